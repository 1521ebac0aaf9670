"""ε of one training by one library, asked for as its documentation shows, with its default settings; as JSON.

    python one_epsilon.py NAME σ q T δ RELATION

RELATION is add_remove or replace_one, of T Poisson samples at rate q; or random_allocation: q is then the number of
steps of an epoch, in one of which each record is, and T the number of epochs. The answer may take 60 s of CPU and 4 GiB
beyond what importing the library takes. Nothing is imported but what NAME names.
"""

import importlib
import importlib.metadata
import json
import resource
import sys
import time

SECONDS, BYTES = 60, 4 * 2**30


def of_dpexp(name: str, z: float, q: float, rounds: int, delta: float, relation: str) -> float:
    from dpexp.accounting.accountants import epsilon
    from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent
    from dpexp.accounting.sampling import sampling_event

    queries, n = (SumQueryEvent("all", 1.0, z),), 1_000_000
    if relation == "random_allocation":
        drawn = {"num_selected": 1, "num_steps": int(q)}
        epochs = [sampling_event(relation, 1 / q, n, epoch=k * int(q), **drawn) for k in range(rounds)]
        return epsilon(Ledger("add_remove", {Round(epoch, queries): int(q) for epoch in epochs}), delta, name)
    sampling = sampling_event("all" if q == 1 else "poisson", q, n)
    return epsilon(Ledger(relation, {Round(sampling, queries): rounds}), delta, name)


def of_dp_accounting(name: str, z: float, q: float, rounds: int, delta: float, relation: str) -> float:
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, pld, rdp

    neighbours = NeighboringRelation.REPLACE_ONE if relation == "replace_one" else NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[name](neighboring_relation=neighbours)
    event = GaussianDpEvent(z)
    accountant.compose(event if q == 1 else PoissonSampledDpEvent(q, event), rounds)
    return accountant.get_epsilon(delta)


def of_opacus(name: str, z: float, q: float, rounds: int, delta: float, relation: str) -> float:
    from opacus.accountants import create_accountant

    accountant = create_accountant(name)
    accountant.history = [(z, q, rounds)]  # as T calls of `step` leave it
    return accountant.get_epsilon(delta)


def of_prv_accountant(name: str, z: float, q: float, rounds: int, delta: float, relation: str) -> float:
    from prv_accountant.dpsgd import DPSGDAccountant

    accountant = DPSGDAccountant(z, q, rounds, delta_error=delta / 1000)  # "typically around 10⁻³ × δ"
    return accountant.compute_epsilon(delta, rounds)[2]


def of_opake(name: str, z: float, q: float, rounds: int, delta: float, relation: str) -> float:
    from opake.api.accounting.dpsgd import gaussian, k_out_of_t, poisson  # of opake.dpsgd.accounting, without torch

    if relation == "random_allocation":
        return (k_out_of_t(gaussian(z), k=1, t=int(q), allocation="block") * rounds).epsilon_at(delta)
    one = gaussian(z) if q == 1 else poisson(gaussian(z), sample_rate=q)
    return (one * rounds).epsilon_at(delta)


def of_pld_accounting(name: str, z: float, q: float, rounds: int, delta: float, relation: str) -> float:
    from PLD_accounting import gaussian_allocation_epsilon_range

    return gaussian_allocation_epsilon_range(delta=delta, sigma=z, num_steps=int(q), num_epochs=rounds)[0]


ASK = {
    "dpexp": (of_dpexp, "dpexp.accounting.accountants", "dpexp"),
    "dp-accounting": (of_dp_accounting, "dp_accounting.pld", "dp-accounting"),
    "Opacus": (of_opacus, "opacus.accountants", "opacus"),
    "prv-accountant": (of_prv_accountant, "prv_accountant.dpsgd", "prv-accountant"),
    "pld-accounting": (of_pld_accounting, "PLD_accounting", "PLD_accounting"),
    "Opake": (of_opake, "opake.api.accounting.dpsgd", "opake-accounting"),
}

if __name__ == "__main__":
    library, _, name = sys.argv[1].partition(" ")
    ask, module, distribution = ASK[library]
    importlib.import_module(module)
    print(json.dumps({"version": importlib.metadata.version(distribution)}), flush=True)
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(began) + SECONDS, -1))
    resource.setrlimit(resource.RLIMIT_DATA, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + BYTES,) * 2)
    z, q, delta = float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[5])
    found = float(ask(name.lower(), z, q, int(sys.argv[4]), delta, sys.argv[6]))
    print(json.dumps({"epsilon": found, "seconds": time.process_time() - began}))
