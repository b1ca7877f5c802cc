"""Says which commits after the first checked one have a subject of over 72 characters, or no body."""

import re
import subprocess
import sys

# Earlier commits are as they are. A clone without it has no history to check.
CHECKED_FROM = "fba96fc"
LONGEST = 72


def wrong(subject: str, body: str) -> list[str]:
    """Return what a commit's message lacks."""
    found = [f"the subject has {len(subject)} characters, not at most {LONGEST}"] if len(subject) > LONGEST else []
    found += ["it says what, not why, and how it was checked: write a body"] if not body.strip() else []
    found += ["it is unfinished"] if re.match(r"(?i)(fixup!|squash!|wip\b)", subject) else []
    return found


def main() -> None:
    git = ["git", "log", "--no-merges", "--format=%h%x1f%s%x1f%b%x1e", f"{CHECKED_FROM}..HEAD"]
    log = subprocess.run(git, capture_output=True, text=True, check=False)
    if log.returncode != 0:
        print(f"commits: not checked, {CHECKED_FROM} is not here")
        return
    messages = [one.strip("\n").split("\x1f") for one in log.stdout.split("\x1e") if one.strip()]
    lines = [f"{commit} {subject!r}: {one}" for commit, subject, body in messages for one in wrong(subject, body)]
    print("\n".join(lines) or f"commits: {len(messages)} checked")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
