//! Translates `overload_manager`: resource monitors and overload actions.
//!
//! Source: `envoy.config.overload.v3`.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use skysail_proto::Codec;
use skysail_xds::envoy::pb::{
    envoy::{
        config::overload::v3::{
            OverloadAction, OverloadManager, ResourceMonitor, resource_monitor, trigger::TriggerOneof,
        },
        extensions::resource_monitors::{
            cgroup_memory::v3::CgroupMemoryConfig, downstream_connections::v3::DownstreamConnectionsConfig,
            fixed_heap::v3::FixedHeapConfig,
        },
    },
    google::protobuf::Any,
};

use crate::overload::pressure::{Action, ActionEffect, LimitedResource, Monitor, Settings, Trigger};

/// Translates the overload manager of a bootstrap file.
///
/// # Errors
/// An unsupported monitor or action, by name; a number out of range.
pub(super) fn settings(proto: &OverloadManager) -> anyhow::Result<Settings> {
    let mut settings = Settings::default();
    if let Some(interval) = &proto.refresh_interval {
        let (seconds, nanos) = (u64::try_from(interval.seconds), u32::try_from(interval.nanos));
        let interval = seconds.ok().zip(nanos.ok().filter(|nanos| *nanos < 1_000_000_000));
        let interval = interval.map(|(seconds, nanos)| Duration::new(seconds, nanos));
        settings.interval = interval
            .filter(|interval| !interval.is_zero())
            .context("refresh_interval: must be longer than 0s")?;
    }
    for (index, monitor) in proto.resource_monitors.iter().enumerate() {
        self::monitor(&mut settings, monitor).with_context(|| format!("resource_monitors[{index}]"))?;
    }
    for (index, action) in proto.actions.iter().enumerate() {
        let action = self::action(&settings, action).with_context(|| format!("actions[{index}]"))?;
        settings.actions.push(action);
    }
    Ok(settings)
}

fn monitor(settings: &mut Settings, proto: &ResourceMonitor) -> anyhow::Result<()> {
    let Some(resource_monitor::ConfigType::TypedConfig(any)) = &proto.config_type else {
        bail!("{:?} has no typed_config", proto.name)
    };
    let resource = match any.type_url.rsplit('/').next().unwrap_or_default() {
        "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig" => {
            let config: DownstreamConnectionsConfig = unpack(any)?;
            let max = u64::try_from(config.max_active_downstream_connections).ok().filter(|max| *max > 0);
            settings.max_connections =
                Some(max.context("max_active_downstream_connections: must be greater than 0")?);
            return Ok(());
        }
        "envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig" => {
            let config: FixedHeapConfig = unpack(any)?;
            ensure!(config.max_heap_size_bytes > 0, "max_heap_size_bytes: must be greater than 0");
            LimitedResource::Heap(config.max_heap_size_bytes)
        }
        "envoy.extensions.resource_monitors.cgroup_memory.v3.CgroupMemoryConfig" => {
            let config: CgroupMemoryConfig = unpack(any)?;
            LimitedResource::Cgroup(Some(config.max_memory_bytes).filter(|max| *max > 0))
        }
        other => bail!("skysail-proxy has no resource monitor {:?} of type {other}: remove it", proto.name),
    };
    let known = settings.monitors.iter().any(|monitor| *monitor.name == *proto.name);
    ensure!(!known, "there are two resource monitors {:?}", proto.name);
    settings.monitors.push(Monitor { name: proto.name.as_str().into(), resource });
    Ok(())
}

fn action(settings: &Settings, proto: &OverloadAction) -> anyhow::Result<Action> {
    let does = match proto.name.as_str() {
        "envoy.overload_actions.stop_accepting_connections" => ActionEffect::StopConnections,
        "envoy.overload_actions.reject_incoming_connections" => ActionEffect::RejectConnections,
        "envoy.overload_actions.stop_accepting_requests" => ActionEffect::StopRequests,
        "envoy.overload_actions.shrink_heap" => ActionEffect::ShrinkHeap,
        other => bail!("skysail-proxy has no overload action {other:?}: remove it"),
    };
    ensure!(!proto.triggers.is_empty(), "{}: needs a trigger", proto.name);
    let mut triggers = Vec::new();
    for (index, trigger) in proto.triggers.iter().enumerate() {
        let at = || format!("{}: triggers[{index}]", proto.name);
        let monitor = settings.monitors.iter().position(|monitor| *monitor.name == *trigger.name);
        let Some(monitor) = monitor else {
            bail!("{}: no resource monitor {:?} has a pressure", at(), trigger.name)
        };
        let (from, to) = match &trigger.trigger_oneof {
            Some(TriggerOneof::Threshold(threshold)) => (threshold.value, threshold.value),
            Some(TriggerOneof::Scaled(scaled)) => (scaled.scaling_threshold, scaled.saturation_threshold),
            None => bail!("{}: needs threshold or scaled", at()),
        };
        let in_range = (0.0..=1.0).contains(&from) && (0.0..=1.0).contains(&to);
        ensure!(in_range && from <= to, "{}: thresholds must be from 0 to 1, the lower one first", at());
        triggers.push(Trigger { monitor, from, to });
    }
    Ok(Action { name: proto.name.as_str().into(), does, triggers })
}

fn unpack<M: Codec>(any: &Any) -> anyhow::Result<M> {
    M::from_slice(&any.value).context("typed_config")
}
