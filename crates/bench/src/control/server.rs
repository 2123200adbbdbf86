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
};

/// The control plane under measurement.
pub(crate) struct Server {
    pub(crate) running: Running,
    pub(crate) target: SocketAddr,
    /// Time until it serves.
    pub(super) start: Duration,
}

impl Server {
    /// Starts the control plane with further arguments.
    pub(crate) async fn start(
        skysail: Option<&Path>,
        tls: bool,
        further: &[OsString],
        folder: &Path,
        config: &Path,
        ca: &Path,
    ) -> anyhow::Result<Self> {
        let program = skysail.map_or_else(std::env::current_exe, |path| Ok(path.to_owned()))?;
        // In a network namespace of its own, the benchmark finds every port free. Without one, any choice of
        // ports may collide.
        let (tls_port, plain_port, admin_port) = (15_012, 15_010, 15_014);
        let mut command = vec![program.into_os_string(), "control".into()];
        for (option, value) in [
            ("--config", config.as_os_str()),
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
        Ok(Self { running, target: ([127, 0, 0, 1], port).into(), start: start.elapsed() })
    }

    /// Returns the number of changes that it has published and validated, by its log.
    pub(super) fn publications(&self) -> usize {
        self.running.count_lines("configuration published")
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
