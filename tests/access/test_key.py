"""API keys: what is made is recognised, what is damaged is told from what is unknown."""

import pytest

from services.access.key import FORM, hash_of, id_of, is_whole, make_key


def test_key_has_its_id_and_a_checksum() -> None:
    key = make_key()

    assert FORM.fullmatch(key.text)
    assert id_of(key.text) == key.id
    assert is_whole(key.text)


def test_two_keys_share_neither_id_nor_secret() -> None:
    assert len({make_key().id for _ in range(20)}) == 20
    assert len({make_key().text for _ in range(20)}) == 20


def test_key_is_kept_as_its_hash_alone() -> None:
    key = make_key()

    assert key.sha256 == hash_of(key.text)
    assert key.text not in repr(key)


@pytest.mark.parametrize("at", [3, 20, 60, -1])
def test_key_with_one_wrong_character_is_not_whole(at: int) -> None:
    text = make_key().text
    wrong = "0" if text[at] != "0" else "1"

    assert not is_whole(text[:at] + wrong + (text[at + 1 :] if at != -1 else ""))


@pytest.mark.parametrize(
    "text", ["", "ub_", "sk-proj-abc", "ub_12345678_short_00000000", f"UB_12345678_{'0' * 64}_00000000"]
)
def test_other_text_is_no_key(text: str) -> None:
    assert id_of(text) is None
    assert not is_whole(text)
