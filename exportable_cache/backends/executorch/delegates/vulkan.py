"""The delegate Vulkan, for GPUs of Android."""

from __future__ import annotations

from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner


def partitioner() -> VulkanPartitioner:
    """Return the partitioner of the delegate."""
    return VulkanPartitioner()
