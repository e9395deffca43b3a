"""A worker's share for each tenant: which waiting request runs next, and which one gives way when the queue is full.

Fairness belongs here, where the requests of all frontends meet: no state is shared between frontends, and none is lost
with one of them. `fair_queue.py` decides who is next, `displacement.py` who gives way; `accounts.py` is what they know
of tenants. The dispatcher asks them.
"""
