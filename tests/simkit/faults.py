"""Makes planned faults happen in a simulated cluster, and heals it in the end."""

import itertools
import random

from common.values.messages import Role
from tests.simkit.cluster import SimCluster
from tests.simkit.plan import PlannedFault
from tests.simkit.sim_redis import RedisState


class Faults:
    """`done`: the kinds that really happened: a fault that finds nothing to hit is none."""

    def __init__(self, cluster: SimCluster) -> None:
        self.done: list[str] = []
        self._cluster = cluster
        self._time = cluster.time
        self._changing: set[str] = set()
        self._redis_states = itertools.count()
        self._redis_state = -1  # the last one, by number

    def inject(self, fault: PlannedFault) -> None:
        rng = random.Random(fault.draw)
        name = rng.choice(list(self._cluster.workers))
        has_hit = getattr(self, f"_{fault.kind}")(name, rng)
        self._cluster.note(f"fault {fault.kind} {name}{'' if has_hit else ' (nothing to hit)'}")
        if has_hit:
            self.done.append(fault.kind)

    def heal(self) -> None:
        """Everything runs again, at normal speed; what was lost stays lost."""
        cluster = self._cluster
        cluster.note("heal")
        cluster.redis.state = RedisState.WELL
        cluster.wire.slowness = 1.0
        cluster.restart_router()
        cluster.router.thaw()
        for name, worker in list(cluster.workers.items()):
            worker.slowness, worker.failing_steps = 1.0, 0
            worker.thaw()
            self._restart(name)
        for session in cluster.sessions.open_sessions():
            session.corruptions = 0

    def _restart(self, name: str) -> None:
        worker = self._cluster.workers[name]
        if not worker.is_alive:
            self._cluster.start_worker(name, worker.role)

    # ---- workers ------------------------------------------------------------------------------------

    def _kill(self, name: str, rng: random.Random) -> bool:
        if not self._cluster.workers[name].is_alive:
            return False
        self._cluster.kill(name)
        self._time.after(rng.uniform(0.1, 3.0), lambda: self._restart(name))
        return True

    def _freeze(self, name: str, rng: random.Random) -> bool:
        worker = self._cluster.workers[name]
        worker.freeze()
        self._time.after(rng.uniform(0.05, 5.0), worker.thaw)
        return worker.is_alive

    def _slow_worker(self, name: str, _: random.Random) -> bool:
        self._cluster.workers[name].slowness = 10.0
        return True

    def _fail_step(self, name: str, _: random.Random) -> bool:
        self._cluster.workers[name].failing_steps = 1
        return True

    def _drain(self, name: str, _: random.Random) -> bool:
        worker = self._cluster.workers[name]
        if not worker.is_alive or worker.is_frozen:
            return False
        self._cluster.drain(name, 1.0)
        self._time.after(2.0, lambda: self._replace(name))
        return True

    def _replace(self, name: str) -> None:
        if self._cluster.workers[name].is_alive:
            self._cluster.kill(name)
        self._restart(name)

    def _change_role(self, name: str, _: random.Random) -> bool:
        """It drains, and then the same process is another life with the other role. One of each role stays."""
        workers = self._cluster.workers
        worker = workers[name]
        alike = [other for other in workers if workers[other].role is worker.role and other not in self._changing]
        if not worker.is_alive or worker.is_frozen or name in self._changing or len(alike) < 2:
            return False
        self._changing.add(name)
        self._cluster.drain(name, 1.0)
        role = worker.role.other
        self._time.after(2.0, lambda: self._become(name, role))
        return True

    def _become(self, name: str, role: Role) -> None:
        if self._cluster.workers[name].is_alive:
            self._cluster.kill(name)
        self._cluster.start_worker(name, role)
        self._changing.discard(name)

    def _clock_jump(self, name: str, rng: random.Random) -> bool:
        """As after a pause of the machine: the process finds itself later than it thought."""
        self._cluster.workers[name].jump(rng.uniform(0.5, 3.0))
        return True

    # ---- the router ---------------------------------------------------------------------------------

    def _router_crash(self, _: str, rng: random.Random) -> bool:
        if not self._cluster.router.is_alive:
            return False
        self._cluster.kill_router()
        self._time.after(rng.uniform(0.1, 2.0), self._cluster.restart_router)
        return True

    def _router_freeze(self, _: str, rng: random.Random) -> bool:
        router = self._cluster.router
        router.freeze()
        self._time.after(rng.uniform(0.05, 3.0), router.thaw)
        return router.is_alive

    # ---- streams and sessions -----------------------------------------------------------------------

    def _cut_stream(self, name: str, _: random.Random) -> bool:
        return self._cluster.disconnect(self._cluster.workers[name], "stream cut")

    def _mute_stream(self, name: str, rng: random.Random) -> bool:
        """One direction of a router stream is silent for a while, the other works."""
        streams = self._cluster.streams_of(self._cluster.workers[name])
        if streams:
            rng.choice(streams).mute(rng.uniform(0.5, 8.0))
        return bool(streams)

    def _break_session(self, _: str, rng: random.Random) -> bool:
        sessions = self._cluster.sessions.open_sessions()
        if sessions:
            rng.choice(sessions).break_("session cut")
        return bool(sessions)

    def _mute_session(self, _: str, rng: random.Random) -> bool:
        """One direction of a handoff's control stream is silent for a while; the link works."""
        sessions = self._cluster.sessions.open_sessions()
        if sessions:
            rng.choice(rng.choice(sessions).streams).mute(rng.uniform(0.5, 8.0))
        return bool(sessions)

    def _corrupt(self, _: str, __: random.Random) -> bool:
        sessions = self._cluster.sessions.open_sessions()
        for session in sessions:
            session.corruptions = 1
        return bool(sessions)

    def _slow_wire(self, _: str, __: random.Random) -> bool:
        self._cluster.wire.slowness = 20.0
        return True

    # ---- Redis --------------------------------------------------------------------------------------

    def _redis_gone(self, _: str, rng: random.Random) -> bool:
        return self._hold_redis(RedisState.GONE, rng)

    def _redis_read_only(self, _: str, rng: random.Random) -> bool:
        return self._hold_redis(RedisState.READ_ONLY, rng)

    def _redis_full(self, _: str, rng: random.Random) -> bool:
        return self._hold_redis(RedisState.FULL, rng)

    def _redis_evicting(self, _: str, rng: random.Random) -> bool:
        return self._hold_redis(RedisState.EVICTING, rng)

    def _redis_slow(self, _: str, rng: random.Random) -> bool:
        return self._hold_redis(RedisState.SLOW, rng)

    def _hold_redis(self, state: RedisState, rng: random.Random) -> bool:
        """For less than a lease or for several of them, unless it gets into another state meanwhile."""
        redis, number = self._cluster.redis, next(self._redis_states)
        redis.state, self._redis_state = state, number

        def end() -> None:
            if self._redis_state == number:
                redis.state = RedisState.WELL

        self._time.after(rng.uniform(0.1, 4.0), end)
        return True

    def _redis_wiped(self, _: str, __: random.Random) -> bool:
        """Empty, with no workers registered, until each has noticed and published everything again."""
        return self._cluster.redis.wipe()

    def _index_stale(self, name: str, _: random.Random) -> bool:
        """The index says of one worker that it holds whatever any worker holds."""
        return self._cluster.make_index_lie(name)
