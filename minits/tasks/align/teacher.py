"""Steps placed by a teacher, a large language model behind any OpenAI-compatible endpoint.

The teacher copies the question with a marker where each step can be inferred (paper, section 3.4
and figure "Prompt for GSM Data Generation"; the prompt here is in our own words). A reply counts
only if it is the question and the steps exactly, but for markers, blanks and the form of quotes.

    out                 JSON lines as the task `rows` reads them: what was accepted
    out.replies.jsonl   every reply with the reason for which it was rejected, or ""; a call that
                        was interrupted goes on from there
"""
import json
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any
from unicodedata import normalize

from tqdm import tqdm

from minits.checkpoint.files import said_by, write_text
from minits.supervision import MARKER, Step, parse_marked
from minits.tasks.align.problems import Problem
from minits.tasks.rows import row_line

KEY = "MINITS_TEACHER_KEY"  # environment variable
STRAIGHT = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
ACCENTS = "\u0300-\u036f"  # as characters of their own
CHARACTER = re.compile(f"\\s+|\\S[{ACCENTS}]*")  # a run of blanks, or a letter with its accents
LETTER = f"\\w{ACCENTS}"
# A word or number: no marker inside.
UNBROKEN = re.compile(f"[{LETTER}$](?:[{LETTER},.:/'\u2019-]*[{LETTER}%])?")
MAX_TOKENS = 2048  # of a reply; endpoints count it into the context that they have
TIMEOUT = 120.0  # seconds that the endpoint may be silent
TRIES = 5  # a problem, before it counts as unanswered
WAIT = 1.0  # seconds before the second try; doubled before each further one
PROMPT = f"""\
You get a word problem and the calculations that solve it, as JSON. Find out how early a reader
who goes from left to right can do each calculation: right after the words that bring the last
number or relation that it needs, be it from the text or from an earlier calculation.

Answer with one JSON object of two keys and nothing else:
"question": the problem, copied character by character, with {MARKER} put in at those places;
"steps": the calculations, copied as they are.

There is exactly one {MARKER} for each calculation, in the same order; several may stand side by
side. None stands within a word or a number. Mend nothing: no spelling, no quotes, no arithmetic."""
EXAMPLES = (
    (
        "A ferry carries 14 cars and twice as many bikes.<T> At the island 9 bikes leave.<T> How "
        "many cars and bikes are left on board?<T>",
        ["14*2=28", "28-9=19", "14+19=33"],
    ),
    (
        "Olga knits one scarf in 6 hours. She is paid $54 a scarf, of which $12 go for wool.<T> "
        "How much does she earn an hour?<T>",
        ["54-12=42", "42/6=7"],
    ),
    (
        "How many stamps has Ravi, if his album has 20 pages of 8 stamps each<T> and a quarter of "
        "all places is empty?<T><T>",
        ["20*8=160", "160/4=40", "160-40=120"],
    ),
)


def align_with_teacher(
    problems: Sequence[Problem],
    out: str | Path,
    *,
    url: str,  # of the endpoint, such as http://localhost:8000/v1
    model: str,  # the name that the endpoint knows it by
    threads: int,  # problems that it gets at a time
) -> Counter[str]:
    """Asks for all problems and writes `out`. Returns how many problems went each way, by reason.

    A problem that was answered, well or badly, is not asked again by a later call. Raises
    ValueError for a URL, a key or a file that cannot be, or if `out` holds rows of another making;
    ConnectionError if none of as many problems in a row as there are threads was answered.
    """
    chat, out = endpoint(url, model), Path(out)
    path = out.with_name(out.name + ".replies.jsonl")
    replies = read_replies(path)
    if out.exists() and not set(lines_of(out)) <= set(accepted(problems, replies).split("\n")):
        raise ValueError(
            f"{out} holds other rows than {path.name} gives for these problems. Nothing is "
            "overwritten: take it away, or name another file."
        )
    todo = {digest(each): each for each in problems if digest(each) not in replies}
    in_a_row, stop = 0, Event()
    with path.open("a", encoding="utf-8") as file, ThreadPoolExecutor(threads) as pool:
        asked = {pool.submit(ask, chat, todo[each], stop): each for each in todo}
        try:
            done = as_completed(asked)
            for future in tqdm(done, "teacher", len(todo), unit="problem", disable=None):
                key, (reply, error) = asked[future], future.result()
                reason = error or judged(todo[key], reply)[1]
                said = {"problem": todo[key].name, "digest": key, "model": model}
                file.write(json.dumps(said | {"reply": reply, "reason": reason}) + "\n")
                file.flush()
                in_a_row = in_a_row + 1 if error else 0
                if not error:
                    replies[key] = reply
                elif in_a_row >= min(threads, len(todo)):
                    raise ConnectionError(
                        f"{url} answered none of the last {in_a_row} problems: {error}. What was "
                        f"answered so far is kept in {path}; see to the endpoint and run it again."
                    )
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            write_text(out, accepted(problems, replies))
    reasons = (reason for _, _, reason in verdicts(problems, replies))
    return Counter(reason.partition(":")[0] or "accepted" for reason in reasons)


def teacher_key() -> str:
    """The key of the endpoint, which is sent there and never written. Raises ValueError."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):  # an error about it would show it
        raise ValueError(f"{KEY} holds characters that no key has; set it again.")
    return key


def endpoint(url: str, model: str) -> Callable[..., Any]:
    """What sends a chat to the teacher. Raises ValueError for a URL or key that cannot be."""
    from huggingface_hub import InferenceClient  # half a second that nothing else needs

    if not re.match("https?://", url):  # the client would take it for a model of the hub
        raise ValueError(f"--teacher-url {url}: must begin with http:// or https://.")
    # Without any key the client would send that of the hub, which is no business of the endpoint.
    client = InferenceClient(base_url=url, api_key=teacher_key() or "none", timeout=TIMEOUT)
    return partial(client.chat_completion, model=model, temperature=0, max_tokens=MAX_TOKENS)


def digest(problem: Problem) -> str:
    """What a problem is found again by, wherever it stands."""
    return sha256(spoken(problem.question, problem.steps).encode()).hexdigest()[:16]


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def read_replies(path: Path) -> dict[str, str]:
    """What was answered before, by digest. Raises ValueError naming a line that is no reply.

    A last line that was cut short by a kill is taken away.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
    replies = {}
    for number, line in enumerate(lines_of(path), 1):
        try:
            said = json.loads(line)
            replies[said["digest"]] = said["reply"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: no reply of a teacher. Take the line out, or name another "
                "--out."
            ) from error
    return {key: reply for key, reply in replies.items() if reply is not None}


def verdicts(
    problems: Sequence[Problem], replies: dict[str, str]
) -> Iterator[tuple[Problem, tuple[Step, ...], str]]:
    """(problem, its steps placed, why it was rejected) of each problem."""
    for problem in problems:
        reply = replies.get(digest(problem))
        steps, reason = ((), "no reply") if reply is None else judged(problem, reply)
        yield problem, steps, reason


def accepted(problems: Sequence[Problem], replies: dict[str, str]) -> str:
    """The rows that were accepted, as lines in the order of the problems."""
    return "".join(
        row_line(problem.question, steps, problem.answer)
        for problem, steps, reason in verdicts(problems, replies)
        if not reason
    )


def messages(problem: Problem) -> list[dict[str, str]]:
    """The prompt: what is asked, the examples, the problem."""
    chat = [{"role": "system", "content": PROMPT}]
    for marked, steps in EXAMPLES:
        chat.append({"role": "user", "content": spoken(marked.replace(MARKER, ""), steps)})
        chat.append({"role": "assistant", "content": spoken(marked, steps)})
    return [*chat, {"role": "user", "content": spoken(problem.question, problem.steps)}]


def spoken(question: str, steps: Sequence[str]) -> str:
    return json.dumps({"question": question, "steps": steps}, ensure_ascii=False)


def ask(chat: Callable[..., Any], problem: Problem, stop: Event) -> tuple[str | None, str]:
    """(reply, "") or, after all TRIES or once `stop` is set, (None, why there is none)."""
    said = ""
    for attempt in range(TRIES):
        if attempt and stop.wait(WAIT * 2 ** (attempt - 1)):
            break
        try:
            return chat(messages(problem)).choices[0].message.content or "", ""
        except Exception as error:
            # The client, its network library and what it makes of a strange body have errors of
            # their own, without a common ancestor.
            said = said_by(error)
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if status < 500 and status not in (408, 429):
                break  # wrong key, no such model: waiting does not help
    said = said.replace(teacher_key() or KEY, KEY)  # some endpoints show the key that they refuse
    return None, f"no reply: {said:.300}"


def judged(problem: Problem, reply: str) -> tuple[tuple[Step, ...], str]:
    """(steps placed in the problem's own question, "") or ((), why the reply is rejected)."""
    reply = reply.rpartition("</think>")[2]  # some models think aloud first
    try:
        said = json.loads(reply[reply.find("{") : reply.rfind("}") + 1])
        marked, steps = said["question"], said["steps"]
        if not isinstance(marked, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        return (), "form: no JSON object with question and steps"
    if steps != list(problem.steps):
        return (), "steps: they are not those of the problem"
    try:
        plain, placed = parse_marked(marked, steps)
    except ValueError as error:
        return (), f"markers: {error}"
    said_characters, said_ends = characters(plain)
    own_characters, own_ends = characters(problem.question)
    if said_characters != own_characters:
        return (), "question: it is not the problem's"
    inside = [match.span() for match in UNBROKEN.finditer(problem.question)]
    moved = []
    for step in placed:
        read = bisect_right(said_ends, step.position)  # blank-free characters before the marker
        at = own_ends[read - 1] if read else 0
        if not read or any(start < at < end for start, end in inside):
            return (), f"place: {step.text} stands within a word or number, or before the text"
        moved.append(Step(at, step.text))
    return tuple(moved), ""


def characters(text: str) -> tuple[str, list[int]]:
    """The normalised text, and the end in `text` of each of its characters that is no blank."""
    normal, ends = "", []
    for match in CHARACTER.finditer(text):
        normal += " " if match[0].isspace() else normalize("NFC", match[0].translate(STRAIGHT))
        if not match[0].isspace():
            ends.append(match.end())
    return normal.strip(), ends
