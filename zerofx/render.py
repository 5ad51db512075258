from __future__ import annotations
class Schedule:
    @staticmethod
    def of(programs, params, group, config, refresh_buckets): return Schedule()
