"""The keys file: what it says is read, and what is wrong with it is told with the place."""

from datetime import date
from pathlib import Path

import pytest

from services.access import keys_file
from services.access.key import make_key
from services.access.keys_file import KeysFileError, keys_in
from services.access.keys_watch import WatchedKeys
from services.core.tenant import Tenant

PATH = Path("keys.toml")
KEY = make_key()
WHOLE = f"""
[tenants.acme]
weight = 3
queue_timeout = 10.5
models = ["smollm2"]
requests_per_minute = 0.5
tokens_per_minute = 100_000
requests_at_once = 20

[tenants.other]

[[keys]]
id = "{KEY.id}"
tenant = "acme"
sha256 = "{KEY.sha256}"
created = 2026-11-29
expires = 2027-01-01
"""


def test_file_has_tenants_with_their_limits_and_keys() -> None:
    (key,) = keys_in(WHOLE, PATH)

    assert (key.id, key.sha256, key.expires) == (KEY.id, KEY.sha256, date(2027, 1, 1))
    assert key.tenant == Tenant(
        name="acme",
        weight=3.0,
        queue_timeout_s=10.5,
        models=frozenset({"smollm2"}),
        requests_per_minute=0.5,
        tokens_per_minute=100_000,
        requests_at_once=20,
    )


def test_tenant_without_limits_has_none() -> None:
    text = WHOLE.replace('tenant = "acme"', 'tenant = "other"')

    assert keys_in(text, PATH)[0].tenant == Tenant(name="other")


def test_empty_file_has_no_keys() -> None:
    assert keys_in("", PATH) == []


WRONG = {
    "no TOML": ("[tenants", "is not TOML"),
    "a number of many digits": ("x = " + "1" * 5000, "is not TOML"),
    "endless nesting": ("x = " + "[" * 100_000, "is not TOML"),
    "an unknown limit": (WHOLE.replace("weight", "wieght"), "unknown field `wieght`"),
    "an unknown table": (WHOLE + "[rates]\n", "unknown field `rates`"),
    "a weight of zero": (WHOLE.replace("weight = 3", "weight = 0"), r">= 1e-06 .*weight"),
    "an endless weight": (WHOLE.replace("weight = 3", "weight = inf"), r"<= 1000000.0 .*weight"),
    "a weight that is no number": (WHOLE.replace("weight = 3", "weight = nan"), "weight"),
    "a wait of zero": (WHOLE.replace("= 10.5", "= 0"), r"> 0.0 .*queue_timeout"),
    "a rate of zero": (WHOLE.replace("= 0.5", "= 0"), r"> 0.0 .*requests_per_minute"),
    "an endless rate": (WHOLE.replace("= 100_000", "= inf"), r"<= 1000000000000.0 .*tokens_per_minute"),
    "no request at a time": (WHOLE.replace("= 20\n", "= 0\n"), r">= 1 .*requests_at_once"),
    "a key without a tenant's table": (WHOLE.replace('tenant = "acme"', 'tenant = "x"'), "'x', which has no table"),
    "a key twice": (WHOLE + WHOLE[WHOLE.index("[[keys]]") :], f"the key {KEY.id} is defined twice"),
    "a hash that is none": (WHOLE.replace(KEY.sha256, "00"), "sha256"),
    "a long name": (WHOLE + f"[tenants.{'a' * 257}]\n", "cannot be a tenant's name"),
    "a name with a space": (WHOLE + '[tenants."a b"]\n', "'a b' cannot be a tenant's name"),
}


@pytest.mark.parametrize(("text", "why"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_file_is_told(text: str, why: str) -> None:
    with pytest.raises(KeysFileError, match=why) as caught:
        keys_in(text, PATH)

    assert str(caught.value).startswith("keys.toml")


def test_file_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeysFileError, match="cannot be read: No such file"):
        WatchedKeys(tmp_path / "keys.toml")

    (tmp_path / "keys.toml").write_bytes(b"\xff")
    with pytest.raises(KeysFileError, match="is not text in UTF-8"):
        WatchedKeys(tmp_path / "keys.toml")

    monkeypatch.setattr(keys_file, "FILE_BYTES_MAX", 10)
    (tmp_path / "keys.toml").write_text(WHOLE)
    with pytest.raises(KeysFileError, match="is larger than 10 bytes"):
        WatchedKeys(tmp_path / "keys.toml")
