"""What the GPU did meanwhile, by NVML: utilization everywhere, SM activity where the card measures it (Hopper on)."""

from __future__ import annotations

from typing import Any

import pynvml

Sample = dict[str, float]


class GpuSampler:
    """One GPU. Each call of ``sample`` tells of the time since the call before."""

    def __init__(self, index: int) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._before: Any = None
        try:
            self._gpm = bool(pynvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        except pynvml.NVMLError:
            self._gpm = False

    def sample(self) -> Sample:
        """``{"gpu_util", "memory_bytes"[, "sm_active"]}``, the first and the last as shares from 0 to 1."""
        found: Sample = {
            "gpu_util": pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0,
            "memory_bytes": float(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used),
        }
        if self._gpm and (active := self._sm_active()) is not None:
            found["sm_active"] = active
        return found

    def _sm_active(self) -> float | None:
        """Needs two of NVML's samples, so the first call has none."""
        now = pynvml.nvmlGpmSampleAlloc()
        try:
            pynvml.nvmlGpmSampleGet(self._handle, now)
        except pynvml.NVMLError:
            pynvml.nvmlGpmSampleFree(now)
            self._gpm = False
            return None
        before, self._before = self._before, now
        if before is None:
            return None
        try:
            wanted = pynvml.c_nvmlGpmMetricsGet_t()
            wanted.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            wanted.numMetrics = 1
            wanted.sample1 = before
            wanted.sample2 = now
            wanted.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
            pynvml.nvmlGpmMetricsGet(wanted)
            return float(wanted.metrics[0].value) / 100.0
        except pynvml.NVMLError:
            return None  # two samples too close to each other; the next ones will do
        finally:
            pynvml.nvmlGpmSampleFree(before)

    def close(self) -> None:
        if self._before is not None:
            pynvml.nvmlGpmSampleFree(self._before)
            self._before = None


def gpu_sampler(index: int | None) -> GpuSampler | None:
    """None where there is no such GPU, or no NVML."""
    if index is None:
        return None
    try:
        pynvml.nvmlInit()
        return GpuSampler(index)
    except pynvml.NVMLError:
        return None
