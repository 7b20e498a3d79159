"""Where text comes from: what lies on every machine that runs seqlab, and files."""

from pathlib import Path


def read_corpus(name: str) -> str:
    """A text that comes with Python or with seqlab's own dependencies.

    `asv`: the American Standard Version of the Bible (1901, public domain), one verse after the other without its
    number, 4.15 million characters. `python_docs`: the topics of Python's `help()` by name, which differ a little from
    one version of Python to the next, about half a million.

    Raises:
        ValueError: no such corpus.
    """
    if name == "asv":
        # Imported late, like the topics: only who reads a corpus waits for it.
        from pythonbible import Version, get_bible

        bible = get_bible(Version.AMERICAN_STANDARD, "plain_text_readers")
        verses = (bible.get_scripture(verse) for verse in bible.get_verse_ids())
        return "\n".join(verse for verse in verses if verse)
    if name == "python_docs":
        from pydoc_data.topics import topics

        return "\n".join(topics[topic] for topic in sorted(topics))
    raise ValueError(f"task.corpus={name} is unknown: use asv or python_docs, or task.path=FILE for a UTF-8 file")


def read_file(path: str) -> str:
    """A UTF-8 file exactly as it is: line ends and a byte order mark are characters like all others.

    Raises:
        ValueError: there is no such file, or nothing in it, or it cannot be read as UTF-8.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"task.path={path} does not exist: name a UTF-8 text file") from None
    except IsADirectoryError:
        raise ValueError(f"task.path={path} is a directory: name a UTF-8 text file") from None
    except OSError as error:
        raise ValueError(f"task.path={path} cannot be read ({error.strerror}): name a UTF-8 text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"task.path={path} is not UTF-8 at byte {error.start}: convert it to UTF-8 first") from None
    if not text:
        raise ValueError(f"task.path={path} is empty: name a UTF-8 text file with something in it")
    return text
