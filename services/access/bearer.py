"""The header, or metadata, by which clients and operators show a secret."""

SCHEME = "bearer"


def bearer_of(authorization: str | None) -> str | None:
    """The token of an `authorization`; None if there is none, or one of another scheme.

    Source: RFC 6750, section 2.1.
    """
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == SCHEME else None
