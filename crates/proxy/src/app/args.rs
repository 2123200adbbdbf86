//! Command line: the arguments as parsed ([`Args`]) and as used ([`Mode`]).

use std::{num::NonZeroUsize, path::PathBuf, thread::available_parallelism, time::Duration};

use anyhow::bail;

use crate::{
    admin::CommandLine,
    app::node::NodeSource,
    discovery::secrets::Mesh,
    overload::Limits,
    translate::bootstrap::{Source, convert::Conversion, runtime},
};

/// Arguments of the sidecar, which starts from an Envoy bootstrap file or as a member of a mesh.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Envoy bootstrap file, YAML or JSON.
    #[arg(long, short = 'c', alias = "config-path", value_name = "FILE", conflicts_with = "discovery")]
    bootstrap: Option<PathBuf>,

    /// Control plane that issues the certificate and serves the configuration, over TLS.
    #[arg(long, value_name = "HOST:PORT", requires_all = ["ca_root", "token"])]
    discovery: Option<String>,

    /// PEM file of the CA certificates that sign the control plane's certificate; reloaded when it changes.
    #[arg(long, value_name = "FILE", requires = "discovery")]
    ca_root: Option<PathBuf>,

    /// File of the service account token; read for every use, and watched for changes.
    #[arg(long, value_name = "FILE", requires = "discovery")]
    token: Option<PathBuf>,

    /// JSON file of the node (envoy.config.core.v3.Node) as Istio's agent writes it. Without it, the environment
    /// describes the node, as the injector sets it in a pod of Kubernetes.
    #[arg(long, value_name = "FILE", requires = "discovery")]
    node: Option<PathBuf>,

    /// Type of the node in a pod of Kubernetes: sidecar, or router for a gateway.
    #[arg(long, value_name = "TYPE", requires = "discovery", conflicts_with = "node", default_value = "sidecar",
          value_parser = ["sidecar", "router"])]
    node_type: String,

    /// Folder with the labels and annotations of the pod: files of the downward API.
    #[arg(
        long,
        value_name = "FOLDER",
        requires = "discovery",
        conflicts_with = "node",
        default_value = "/etc/istio/pod"
    )]
    pod_info: PathBuf,

    /// Run this Envoy instead of the sidecar, with certificates and configuration from the same control plane.
    /// Any public build works; the control plane then omits the filters that only Istio's build has.
    #[arg(long, value_name = "PROGRAM", requires = "discovery")]
    envoy: Option<PathBuf>,

    /// Number of worker threads; defaults to `concurrency` of the node's settings, or to the number of CPUs
    /// available to the process.
    #[arg(long, value_name = "N")]
    concurrency: Option<NonZeroUsize>,

    /// SO_MARK of every socket that the sidecar opens, which exempts it from traffic interception.
    #[arg(long, value_name = "N")]
    interception_mark: Option<u32>,

    /// Port of the admin page on 127.0.0.1; 0 selects a free port. Defaults to the bootstrap file's address, or
    /// to 15000 in a mesh.
    #[arg(long, value_name = "PORT")]
    admin_port: Option<u16>,

    /// Port of /healthz/ready; 0 selects a free port. Defaults to 15021 in a mesh; not served with a bootstrap
    /// file.
    #[arg(long, value_name = "PORT")]
    health_port: Option<u16>,

    /// Port of /stats/prometheus; 0 selects a free port. Defaults to 15090 in a mesh; not served with a
    /// bootstrap file.
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,

    /// Port of /stats/prometheus with the workload's metrics after the sidecar's, and of the probes of a pod's
    /// containers; 0 selects a free port. Defaults to 15020 in a mesh; not served with a bootstrap file. The
    /// variables ISTIO_PROMETHEUS_ANNOTATIONS and ISTIO_KUBE_APP_PROBERS describe both, as Istio's injector sets
    /// them.
    #[arg(long, value_name = "PORT")]
    merged_metrics_port: Option<u16>,

    /// Maximum number of series of Istio's metrics per worker, for requests and for connections. Further series
    /// are not recorded.
    #[arg(long, value_name = "N", default_value_t = Limits::default().series)]
    max_metric_series: usize,

    /// Sets a runtime key to a number; may be repeated. It overrides every runtime layer of the bootstrap file.
    /// Keys: skysail.overload.under_way, skysail.overload.late_ms, skysail.overload.refuse_ms,
    /// skysail.admission.drain_ms, skysail.admission.end_with_certificate,
    /// overload.premature_reset_total_stream_count.
    #[arg(long, value_name = "KEY=NUMBER", value_parser = setting)]
    runtime: Vec<(String, String)>,

    /// Drain timeout in seconds: the time that requests in flight have to finish after SIGTERM. Defaults to
    /// `terminationDrainDuration` of the node's settings, or to 5.
    #[arg(long, value_name = "SECONDS")]
    drain_seconds: Option<u64>,

    /// Disables the system call filter (seccomp) and no_new_privs. Neither ever applies to --envoy.
    #[arg(long)]
    no_seccomp: bool,

    #[command(flatten)]
    envoys: EnvoysArgs,

    /// Converts standard input to standard output and exits. The sidecar runs itself with this flag to use
    /// Envoy's descriptors without loading them.
    #[arg(long, value_name = "FORM", hide = true, exclusive = true)]
    convert: Option<Conversion>,
}

/// Envoy's own options, so that Istio's agent and other launchers of Envoy can start the sidecar instead.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options of Envoy")]
struct EnvoysArgs {
    /// Bootstrap in YAML or JSON, merged into that of the file.
    #[arg(long, value_name = "TEXT", requires = "bootstrap")]
    config_yaml: Option<String>,

    /// Log level: trace, debug, info, warning, error, critical or off. SKYSAIL_LOG takes precedence.
    #[arg(long, short = 'l', value_name = "LEVEL")]
    log_level: Option<String>,

    /// Task: serve traffic, or validate the bootstrap file and exit.
    #[arg(long, value_name = "MODE", default_value = "serve", value_parser = ["serve", "validate"])]
    mode: String,

    /// Drain time in seconds of /drain_listeners?graceful.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    drain_time_s: u64,

    /// Warn about bootstrap fields that are known but not supported, instead of refusing them.
    #[arg(long, requires = "bootstrap")]
    allow_unknown_static_fields: bool,

    /// Levels of Envoy's own loggers; ignored.
    #[arg(long, value_name = "LEVELS", hide = true)]
    component_log_level: Option<String>,

    /// Ignored: every drain notifies all clients immediately.
    #[arg(long, value_name = "STRATEGY", value_parser = ["gradual", "immediate"], hide = true)]
    drain_strategy: Option<String>,

    /// Ignored.
    #[arg(long, value_name = "VERSION", value_parser = ["v4", "v6"], hide = true)]
    local_address_ip_version: Option<String>,

    /// Ignored: access logs are flushed every 100 ms.
    #[arg(long, value_name = "MILLISECONDS", hide = true)]
    file_flush_interval_msec: Option<u64>,

    /// Ignored: access logs are flushed every 100 ms.
    #[arg(long, value_name = "KB", hide = true)]
    file_flush_min_size_kb: Option<u64>,

    /// Ignored: hot restart does not exist.
    #[arg(long, hide = true)]
    disable_hot_restart: bool,

    /// Ignored.
    #[arg(long, hide = true)]
    skip_deprecated_logs: bool,

    /// Ignored.
    #[arg(long, hide = true)]
    enable_core_dump: bool,
}

/// Task of the process, as the command line selects it.
pub(crate) enum Mode {
    Convert(Conversion),
    Bootstrap(Source, Common),
    /// Validates a bootstrap file.
    Validate(Source),
    Mesh(Mesh, NodeSource, Common),
    /// Runs this Envoy instead of the sidecar.
    Envoy(PathBuf, Mesh, NodeSource, Common),
}

/// Drain timeout without a setting. Source: Istio's default.
const DRAIN: Duration = Duration::from_secs(5);

/// Settings common to all modes that carry traffic.
pub(crate) struct Common {
    /// Number of worker threads; `None`: that of the CPUs.
    pub(crate) concurrency: Option<NonZeroUsize>,
    pub(crate) mark: Option<u32>,
    pub(crate) admin_port: Option<u16>,
    pub(crate) health_port: Option<u16>,
    pub(crate) metrics_port: Option<u16>,
    pub(crate) merged_metrics_port: Option<u16>,
    pub(crate) metric_series: usize,
    /// Runtime keys with their values.
    pub(crate) runtime: Vec<(String, String)>,
    /// Drain timeout; `None`: the default.
    pub(crate) drain: Option<Duration>,
    /// Enables the system call filter.
    pub(crate) seccomp: bool,
    /// Options that the admin page shows.
    pub(crate) admin: CommandLine,
}

impl Common {
    pub(crate) fn concurrency(&self) -> usize {
        // `available_parallelism` honours the CPU quota of the cgroup.
        self.concurrency.or_else(|| available_parallelism().ok()).map_or(1, NonZeroUsize::get)
    }

    pub(crate) fn drain(&self) -> Duration {
        self.drain.unwrap_or(DRAIN)
    }
}

impl Args {
    /// Returns the initial log level, if the command line sets one.
    pub(crate) fn log_level(&self) -> Option<&str> {
        self.envoys.log_level.as_deref()
    }

    /// Checks the combination of arguments and returns the mode.
    pub(crate) fn mode(self) -> anyhow::Result<Mode> {
        if let Some(conversion) = self.convert {
            return Ok(Mode::Convert(conversion));
        }
        let envoys = self.envoys;
        let common = Common {
            concurrency: self.concurrency,
            mark: self.interception_mark,
            admin_port: self.admin_port,
            health_port: self.health_port,
            metrics_port: self.metrics_port,
            merged_metrics_port: self.merged_metrics_port,
            metric_series: self.max_metric_series,
            runtime: self.runtime,
            drain: self.drain_seconds.map(Duration::from_secs),
            seccomp: !self.no_seccomp,
            admin: CommandLine {
                drain_time: Duration::from_secs(envoys.drain_time_s),
                config_path: self
                    .bootstrap
                    .as_ref()
                    .map(|path| path.display().to_string())
                    .unwrap_or_default(),
                config_yaml: envoys.config_yaml.clone().unwrap_or_default(),
                lenient: envoys.allow_unknown_static_fields,
            },
        };
        let node = match self.node {
            Some(path) => NodeSource::File(path),
            None => NodeSource::Pod { info: self.pod_info, role: self.node_type },
        };
        match (self.bootstrap, self.discovery, self.ca_root, self.token) {
            (Some(_), ..) if common.merged_metrics_port.is_some() && common.metrics_port.is_none() => {
                bail!("--merged-metrics-port with --bootstrap needs --metrics-port")
            }
            (Some(path), ..) => {
                let source =
                    Source { path, merged: envoys.config_yaml, lenient: envoys.allow_unknown_static_fields };
                Ok(match envoys.mode.as_str() {
                    "validate" => Mode::Validate(source),
                    _ => Mode::Bootstrap(source, common),
                })
            }
            _ if envoys.mode == "validate" => bail!("--mode validate needs --bootstrap FILE"),
            (None, Some(discovery), Some(ca_root), Some(token)) => {
                let (host, port) = host_and_port(&discovery)?;
                let mesh = Mesh { host, port, ca_root, token };
                Ok(match self.envoy {
                    Some(program) => Mode::Envoy(program, mesh, node, common),
                    None => Mode::Mesh(mesh, node, common),
                })
            }
            _ => bail!("give either --bootstrap FILE, or --discovery HOST:PORT with --ca-root and --token"),
        }
    }
}

/// Parses and validates a runtime key with its value.
fn setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("give a key and a number: KEY=NUMBER")?;
    runtime::set(&mut Limits::default(), key, value).map_err(|error| format!("{error:#}"))?;
    Ok((key.to_owned(), value.to_owned()))
}

fn host_and_port(text: &str) -> anyhow::Result<(String, u16)> {
    let parsed = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parsed {
        Some((host, port)) if !host.is_empty() => {
            Ok((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
        }
        _ => {
            bail!("--discovery {text:?} must be of the form HOST:PORT, such as istiod.istio-system.svc:15012")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_can_be_set_on_the_command_line() {
        let key = "skysail.overload.late_ms";
        assert_eq!(setting(&format!("{key}=50")), Ok((key.to_owned(), "50".to_owned())));
        let refused = |text: &str| setting(text).unwrap_err();
        assert!(refused(key).contains("KEY=NUMBER"));
        assert!(refused(&format!("{key}=fast")).contains("\"fast\" is not a whole number"));
        assert!(refused("skysail.overload.latest_ms=1").contains("there is no skysail.overload.latest_ms"));
    }
}
