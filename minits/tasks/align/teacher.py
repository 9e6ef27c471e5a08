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
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import sha256
from pathlib import Path
from typing import Any
from unicodedata import normalize

from huggingface_hub import InferenceClient
from tqdm import tqdm

from minits.supervision import MARKER, Step, parse_marked
from minits.tasks.align.problems import Problem

KEY = "MINITS_TEACHER_KEY"  # environment variable
STRAIGHT = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
CHARACTER = re.compile("\\s+|\\S[\u0300-\u036f]*")  # a run of blanks, or a letter with its accents
UNBROKEN = re.compile(r"[\w$](?:[\w,.:/'\u2019-]*[\w%])?")  # a word or number: no marker inside
MAX_TOKENS = 4096  # of a reply
PROMPT = f"""\
You get a word problem and the calculations that solve it, as JSON. Find out how early a reader who \
goes from left to right can do each calculation: right after the words that bring the last number or \
relation that it needs, be it from the text or from an earlier calculation.

Answer with one JSON object of two keys and nothing else:
"question": the problem, copied character by character, with {MARKER} put in at those places;
"steps": the calculations, copied as they are.

There is exactly one {MARKER} for each calculation, in the same order; several may stand side by \
side. None stands within a word or a number. Mend nothing: no spelling, no quotes, no arithmetic."""
EXAMPLES = (
    (
        "A ferry carries 14 cars and twice as many bikes. At the island 9 bikes leave. How many "
        "cars and bikes are left on board?",
        "A ferry carries 14 cars and twice as many bikes.<T> At the island 9 bikes leave.<T> How "
        "many cars and bikes are left on board?<T>",
        ["14*2=28", "28-9=19", "14+19=33"],
    ),
    (
        "Olga knits one scarf in 6 hours. She is paid $54 a scarf, of which $12 go for wool. How "
        "much does she earn an hour?",
        "Olga knits one scarf in 6 hours. She is paid $54 a scarf, of which $12 go for wool.<T> "
        "How much does she earn an hour?<T>",
        ["54-12=42", "42/6=7"],
    ),
    (
        "How many stamps has Ravi, if his album has 20 pages of 8 stamps each and a quarter of "
        "all places is empty?",
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
    threads: int = 8,
    timeout: float = 120.0,  # seconds that one reply may take
    tries: int = 5,  # a problem, before it counts as unanswered
    wait: float = 1.0,  # seconds before the second try; doubled before each further one
    silent: bool = False,  # no progress bar
) -> Counter[str]:
    """Asks for all problems and writes `out`. Returns how many problems went each way, by reason.

    A problem that was answered, well or badly, is not asked again by a later call. Raises
    ConnectionError if none of as many problems in a row as there are threads was answered.
    """
    out = Path(out)
    path = out.with_name(out.name + ".replies.jsonl")
    rows = dict(enumerate(map(content_hash, problems)))
    replies = read_replies(path, rows)
    todo = [row for row in rows if row not in replies]
    # Without any key the client would send that of the hub, which is no business of the endpoint.
    client = InferenceClient(base_url=url, api_key=os.environ.get(KEY) or "none", timeout=timeout)
    unanswered = 0
    with path.open("a", encoding="utf-8") as file, ThreadPoolExecutor(threads) as pool:
        asked = {pool.submit(ask, client, model, problems[row], tries, wait): row for row in todo}
        try:
            done = as_completed(asked)
            for future in tqdm(done, "teacher", len(todo), unit="problem", disable=silent):
                row = asked[future]
                reply, error = future.result()
                unanswered = unanswered + 1 if error else 0
                reason = error or judged(problems[row], reply)[1]
                said = {"row": row, "hash": rows[row], "model": model}
                said |= {"reply": reply, "reason": reason}
                file.write(json.dumps(said, ensure_ascii=False) + "\n")
                file.flush()
                replies[row] = said
                if unanswered >= min(threads, len(todo)):
                    raise ConnectionError(
                        f"{url} answered none of the last {unanswered} problems: {error}. What was "
                        f"answered so far is kept in {path}; see to the endpoint and run it again."
                    )
        finally:
            pool.shutdown(cancel_futures=True)
            write_accepted(problems, replies, out)
    return Counter(replies[row]["reason"].partition(":")[0] or "accepted" for row in replies)


def content_hash(problem: Problem) -> str:
    content = json.dumps([problem.question, problem.steps, problem.answer])
    return sha256(content.encode()).hexdigest()[:16]


def read_replies(path: Path, rows: dict[int, str]) -> dict[int, dict[str, Any]]:
    """What was answered before, by row; a line that was cut short by a kill is taken away."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    replies = map(json.loads, whole.decode().split("\n")[:-1])
    return {
        said["row"]: said
        for said in replies
        if rows.get(said["row"]) == said["hash"] and said["reply"] is not None
    }


def write_accepted(
    problems: Sequence[Problem], replies: dict[int, dict[str, Any]], out: Path
) -> None:
    """The rows that were accepted, in order, under a temporary name first."""
    temporary = out.with_name(out.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in sorted(replies):
            if replies[row]["reason"]:
                continue
            problem = problems[row]
            steps, _ = judged(problem, replies[row]["reply"])
            placed = [{"at": step.position, "text": step.text} for step in steps]
            line = {"question": problem.question, "steps": placed, "answer": problem.answer}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    temporary.replace(out)


def messages(problem: Problem) -> list[dict[str, str]]:
    """The prompt: what is asked, the examples, the problem."""
    chat = [{"role": "system", "content": PROMPT}]
    for question, marked, steps in EXAMPLES:
        chat.append({"role": "user", "content": spoken(question, steps)})
        chat.append({"role": "assistant", "content": spoken(marked, steps)})
    return [*chat, {"role": "user", "content": spoken(problem.question, problem.steps)}]


def spoken(question: str, steps: Sequence[str]) -> str:
    return json.dumps({"question": question, "steps": steps}, ensure_ascii=False)


def ask(
    client: InferenceClient, model: str, problem: Problem, tries: int, wait: float
) -> tuple[str | None, str]:
    """(reply, "") or, after so many tries, (None, why there is none)."""
    for attempt in range(tries):
        if attempt:
            time.sleep(wait * 2 ** (attempt - 1))
        try:
            answer = client.chat_completion(
                messages(problem), model=model, temperature=0, max_tokens=MAX_TOKENS
            )
            return answer.choices[0].message.content or "", ""
        except Exception as error:
            # The client, its network library and what it makes of a strange body have errors of
            # their own, without a common ancestor.
            said = " ".join(str(error).split()) or type(error).__name__
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if status < 500 and status not in (408, 429):
                break  # wrong key, no such model: waiting does not help
    return None, f"no reply: {said:.300}"


def judged(problem: Problem, reply: str) -> tuple[tuple[Step, ...], str]:
    """(steps placed in the problem's own question, "") or ((), why the reply is rejected)."""
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
