"""Pure planning: from a resolved configuration to one frozen :class:`~sgl_omni.topology.plan.Plan`."""
