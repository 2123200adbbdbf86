//! Results of `skysail bench control`, as in the result file.

use serde::Serialize;

use super::{
    ControlArgs, Subscription,
    mesh::{Change, Size, cluster::ApiServerLoad},
    message::Form,
};
use crate::report::Machine;

/// The result file; `docs/benchmarks.md` describes its format.
#[derive(Debug, Serialize)]
pub(super) struct ControlReport {
    pub(super) format: u32,
    pub(super) benchmark: &'static str,
    pub(super) version: &'static str,
    /// Seconds since 1970.
    pub(super) started: u64,
    pub(super) machine: Machine,
    pub(super) settings: ControlSettings,
    /// Seconds from the start of the process until it serves.
    pub(super) start_seconds: f64,
    /// Resident megabytes before any sidecar connects.
    pub(super) idle_mb: f64,
    pub(super) connect: ConnectResult,
    pub(super) changes: Vec<ChangeResult>,
    pub(super) churn: Option<Churn>,
    /// Resident megabytes after all sidecars have disconnected.
    pub(super) left_mb: f64,
    /// Load of the cluster's API server since the objects were written, if the mesh is in a cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) api_server: Option<ApiServerLoad>,
}

#[derive(Debug, Serialize)]
pub(super) struct ControlSettings {
    pub(super) sidecars: u32,
    /// Gateways besides the sidecars, in a large mesh.
    pub(super) gateways: usize,
    pub(super) mesh: Size,
    pub(super) services: u32,
    pub(super) namespaces: u32,
    pub(super) endpoints: u32,
    pub(super) subscribe: Subscription,
    pub(super) used: u32,
    pub(super) whole_routes: bool,
    pub(super) form: Form,
    pub(super) tls: bool,
    pub(super) streams: u32,
    pub(super) at_once: u32,
    /// The objects are in a Kubernetes cluster.
    pub(super) kubernetes: bool,
    /// The control plane is istiod.
    pub(super) istiod: bool,
}

/// Result of connecting all sidecars.
#[derive(Debug, Serialize)]
pub(super) struct ConnectResult {
    pub(super) seconds: f64,
    /// Sidecars connected and configured per second.
    pub(super) per_second: f64,
    /// CPU time of the control plane per sidecar.
    pub(super) cpu_ms_each: f64,
    /// CPU time of this process per sidecar.
    pub(super) driver_cpu_ms_each: f64,
    /// Time from the start of a sidecar's connection until the sidecar is configured.
    pub(super) ms: Quantiles,
    pub(super) kilobytes_each: f64,
    pub(super) resources_each: f64,
    /// Resident megabytes of the control plane once it is idle, and the peak so far.
    pub(super) resident_mb: f64,
    pub(super) peak_mb: f64,
}

/// Result of a change.
#[derive(Debug, Serialize)]
pub(super) struct ChangeResult {
    pub(super) change: Change,
    /// Sidecars and gateways that must receive it.
    pub(super) sidecars: usize,
    /// Sidecars and gateways that received something: median of the changes.
    pub(super) reached: usize,
    /// Time from the change of the file until a sidecar has it, over all changes and sidecars.
    pub(super) ms: Quantiles,
    /// Time until the last sidecar has it: median of the changes.
    pub(super) last_ms: f64,
    /// CPU time of the control plane per change: median.
    pub(super) cpu_ms: f64,
    /// Bytes for each sidecar and gateway that received something.
    pub(super) bytes_each: f64,
}

/// Result of disconnecting and reconnecting sidecars.
#[derive(Debug, Serialize)]
pub(super) struct Churn {
    pub(super) percent: u32,
    pub(super) seconds: f64,
    pub(super) per_second: f64,
    pub(super) cpu_ms_each: f64,
    pub(super) ms: Quantiles,
    /// Number of changes during that time.
    pub(super) changes: u64,
    /// Resident megabytes at the end of each tenth of the time.
    pub(super) resident_mb: Vec<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Quantiles {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) last: f64,
}

impl ControlSettings {
    pub(super) fn of(args: &ControlArgs) -> Self {
        Self {
            sidecars: args.sidecars,
            gateways: args.gateways(),
            mesh: args.mesh,
            services: args.services,
            namespaces: args.namespaces,
            endpoints: args.endpoints,
            subscribe: args.subscribe,
            used: args.used,
            whole_routes: args.whole_routes,
            form: args.form,
            tls: args.tls,
            streams: args.streams,
            at_once: args.at_once,
            kubernetes: args.kubeconfig.is_some(),
            istiod: args.istiod.is_some(),
        }
    }
}

impl Quantiles {
    /// Summarizes nanoseconds as milliseconds.
    pub(super) fn of(mut values: Vec<u64>) -> Self {
        values.sort_unstable();
        let at = |share: f64| {
            let index = ((values.len() as f64 * share).ceil() as usize).max(1) - 1;
            values.get(index).copied().unwrap_or_default() as f64 / 1e6
        };
        Self { p50: at(0.5), p99: at(0.99), last: at(1.0) }
    }

    pub(super) fn text(&self) -> String {
        format!("P50 {:.1} ms, P99 {:.1}, the last {:.1}", self.p50, self.p99, self.last)
    }
}
