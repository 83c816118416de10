"""Numbers as people read them."""


def size(n):
    """Bytes in the largest binary unit that keeps the number above 1: "1.18 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024:
            break
        n /= 1024
    else:
        unit = "PiB"
    return f"{n:,.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:#.3g} {unit}"


def exact(n):
    """Every byte: "1,234,567 B". Where a group does not divide the data, a device's mean share has a fraction."""
    return f"{n:,.0f} B" if n == int(n) else f"{n:,.1f} B"


def both(n):
    """"1,234,567 B (1.18 MiB)"."""
    return exact(n) if n < 1024 else f"{exact(n)} ({size(n)})"


def span(seconds):
    """Time as "0:54" or "1:02:03"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def duration(seconds):
    """A short time in the unit that suits it: "1.18 ms"."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.0f} {unit}" if seconds * factor >= 99.95 else f"{seconds * factor:#.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0"
