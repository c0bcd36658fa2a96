"""Proofs of the join token."""

from tasks.protocol.auth import LIFETIME_S, METADATA, Caller, Gate, call_proof, node_proof


def test_a_caller_is_admitted_at_the_node_it_signed_for_only() -> None:
    ((key, proof),) = Caller("token").metadata("a:1")
    assert key == METADATA
    assert Gate("token", "a:1").admits(proof)
    assert not Gate("token", "b:1").admits(proof)
    assert not Gate("other", "a:1").admits(proof)


def test_an_old_proof_is_refused_also_when_it_was_known() -> None:
    gate = Gate("token", "a:1")
    old = call_proof("token", "a:1", now=-LIFETIME_S)
    assert not gate.admits(old)
    assert not gate.admits(old)


def test_rubbish_is_refused() -> None:
    gate = Gate("token", "a:1")
    for proof in ("", ".", "x.y", "9999999999", "9999999999.", "²³.00", "-1.00"):
        assert not gate.admits(proof)


def test_a_node_signs_name_and_nonce() -> None:
    proofs = {node_proof(t, n, x) for t in ("t", "u") for n in ("a:1", "b:1") for x in (b"1", b"2")}
    assert len(proofs) == 8
