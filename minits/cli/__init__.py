import warnings

# At the command line a warning is a note: its text, without the line of code that gave it.
warnings.formatwarning = lambda message, *_: f"{message}\n"
