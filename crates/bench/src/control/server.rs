//! The control plane under measurement.

use std::{
    ffi::OsString,
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

use crate::{
    accounting,
    child::{Running, Scheduling},
    namespace::free_ports,
};

/// Lines in the log of istiod and of Skysail about a change that is published.
const ISTIOD_PUBLISHED: &str = "Push debounce stable";
const PUBLISHED: &str = "configuration published";

/// How to start a control plane.
pub(crate) struct ServerArgs<'a> {
    /// Skysail's program, if not this one.
    pub(crate) skysail: Option<&'a Path>,
    pub(crate) tls: bool,
    /// Further arguments.
    pub(crate) further: &'a [OsString],
    /// Folder of its log.
    pub(crate) folder: &'a Path,
    pub(crate) source: Source<'a>,
    /// Folder with the authority.
    pub(crate) ca: &'a Path,
}

/// Where a control plane reads objects.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Folder(&'a Path),
    /// The cluster of a kubeconfig.
    Kubeconfig(&'a Path),
}

/// The control plane under measurement.
pub(crate) struct Server {
    pub(crate) running: Running,
    pub(crate) target: SocketAddr,
    /// Part of the log's line about a published change.
    published: &'static str,
    /// Time until it serves.
    pub(super) start: Duration,
}

impl Server {
    /// Starts Skysail's control plane.
    pub(crate) async fn start(args: ServerArgs<'_>) -> anyhow::Result<Self> {
        let ServerArgs { skysail, tls, further, folder, source, ca } = args;
        let program = skysail.map_or_else(std::env::current_exe, |path| Ok(path.to_owned()))?;
        let [tls_port, plain_port, admin_port] = free_ports()?;
        let mut command = vec![program.into_os_string(), "control".into()];
        let source = match source {
            Source::Folder(folder) => ("--config", folder.as_os_str()),
            Source::Kubeconfig(file) => ("--kubeconfig", file.as_os_str()),
        };
        for (option, value) in [
            source,
            ("--ca-dir", ca.as_os_str()),
            ("--listen", "127.0.0.1".as_ref()),
            ("--tls-port", tls_port.to_string().as_ref()),
            ("--plain-port", plain_port.to_string().as_ref()),
            ("--admin-port", admin_port.to_string().as_ref()),
        ] {
            command.extend([option.into(), value.to_owned()]);
        }
        // All sidecars have the same address.
        command.extend(["--max-connections-per-address".into(), "0".into()]);
        command.extend_from_slice(further);
        let scheduling = Scheduling::default();
        let start = Instant::now();
        let mut running = Running::start("control", &command, folder, scheduling)?;
        running.ready(plain_port).await?;
        let port = if tls { tls_port } else { plain_port };
        let (target, start) = (([127, 0, 0, 1], port).into(), start.elapsed());
        Ok(Self { running, target, published: PUBLISHED, start })
    }

    /// Starts istiod on the cluster of a kubeconfig, as its Deployment does, but without webhooks.
    pub(crate) async fn start_istiod(
        program: &Path,
        kubeconfig: &Path,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let [http, https, plain, tls, monitoring] = free_ports()?;
        let mut command: Vec<OsString> = ["env", "POD_NAME=istiod-0", "POD_NAMESPACE=istio-system"]
            .into_iter()
            .chain(["PILOT_CERT_PROVIDER=istiod", "REVISION=default", "CLUSTER_ID=Kubernetes"])
            .chain(["INJECTION_WEBHOOK_CONFIG_NAME=", "VALIDATION_WEBHOOK_CONFIG_NAME="])
            // The default refuses more than 25 connections a second on two cores.
            .chain(["PILOT_MAX_REQUESTS_PER_SECOND=100000"])
            .map(OsString::from)
            .collect();
        command.extend([program.into(), "discovery".into(), "--kubeconfig".into(), kubeconfig.into()]);
        command.extend(["--domain", "cluster.local", "--ctrlz_port", "0"].map(OsString::from));
        for (option, port) in [
            ("--httpAddr", http),
            ("--httpsAddr", https),
            ("--grpcAddr", plain),
            ("--secureGRPCAddr", tls),
            ("--monitoringAddr", monitoring),
        ] {
            command.extend([option.into(), format!("127.0.0.1:{port}").into()]);
        }
        let start = Instant::now();
        let mut running = Running::start("istiod", &command, folder, Scheduling::default())?;
        running.ready(plain).await?;
        let (target, start) = (([127, 0, 0, 1], plain).into(), start.elapsed());
        Ok(Self { running, target, published: ISTIOD_PUBLISHED, start })
    }

    /// Returns the number of changes that it has published and validated, by its log.
    pub(super) fn publications(&self) -> usize {
        self.running.count_lines(self.published)
    }

    /// Returns true if it reports a change before the work for it, as istiod does.
    pub(super) fn reports_early(&self) -> bool {
        self.published == ISTIOD_PUBLISHED
    }

    /// Returns the CPU time so far, in nanoseconds.
    ///
    /// # Errors
    /// It has ended.
    pub(crate) fn cpu(&self) -> anyhow::Result<u64> {
        Ok(accounting::cpu(&[self.running.pid()])?.nanoseconds)
    }

    /// Returns the resident memory in megabytes.
    pub(crate) fn resident(&self) -> f64 {
        accounting::resident(&[self.running.pid()]) as f64 / 1_024.0
    }

    /// Returns the peak resident memory in megabytes.
    pub(super) fn peak(&self) -> f64 {
        accounting::peak(self.running.pid()) as f64 / 1_024.0
    }
}
