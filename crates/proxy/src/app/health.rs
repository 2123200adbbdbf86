//! Health check of the workload beside the sidecar, as Istio's agent runs it on machines: the probe is
//! `readinessProbe` of the proxy's settings in the node's metadata. Changes are reported to the control plane.
//!
//! Meanings and defaults are Istio's. An HTTP response is good if its status is from 200 to 399.

use std::{convert::Infallible, process::Stdio, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use axum::http::Method;
use serde::Deserialize;
use serde_json::Value;
use skysail_core::process_group::ProcessGroup;
use tokio::{
    process::Command,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::checks::{self, CheckTarget, GrpcCheck, HttpCheck, SocketCheck};
use crate::discovery::Configuration;

/// Health check. Source: `istio.networking.v1.ReadinessProbe`. Zero stands for the default.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Probe {
    initial_delay_seconds: u32,
    timeout_seconds: u32,
    period_seconds: u32,
    success_threshold: u32,
    failure_threshold: u32,
    http_get: Option<HttpCheck>,
    tcp_socket: Option<SocketCheck>,
    exec: Option<ExecProbe>,
    grpc: Option<GrpcCheck>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ExecProbe {
    command: Vec<String>,
}

/// Health of the workload, which the thresholds derive from the results of checks.
#[derive(Debug, Default)]
struct HealthState {
    successes: u32,
    failures: u32,
    /// The last report; `None` before the first.
    reported: Option<bool>,
}

impl HealthState {
    /// Records a result. Returns whether it is to be reported.
    fn record(&mut self, probe: &Probe, is_good: bool) -> bool {
        let or = |number: u32, default: u32| if number == 0 { default } else { number };
        let (count, threshold) = if is_good {
            self.failures = 0;
            (&mut self.successes, or(probe.success_threshold, 1))
        } else {
            self.successes = 0;
            (&mut self.failures, or(probe.failure_threshold, 3))
        };
        *count = count.saturating_add(1);
        *count >= threshold && self.reported.replace(is_good) != Some(is_good)
    }
}

impl Probe {
    /// Reads the probe from the settings of a proxy.
    ///
    /// # Errors
    /// The probe is not valid.
    pub(crate) fn of_settings(config: &Value) -> anyhow::Result<Option<Self>> {
        match &config["readinessProbe"] {
            Value::Null => Ok(None),
            probe => Self::deserialize(probe).map(Some).context("PROXY_CONFIG: readinessProbe"),
        }
    }

    /// Checks the workload and reports changes of its health, without end. `mark` is the SO_MARK of sockets.
    pub(crate) async fn run(self, configuration: Arc<Configuration>, mark: Option<u32>) -> Infallible {
        let seconds = |number: u32, default: u32| {
            Duration::from_secs(if number == 0 { default } else { number }.into())
        };
        let period = seconds(self.period_seconds, 10);
        let limit = seconds(self.timeout_seconds, 1);
        sleep(seconds(self.initial_delay_seconds, 0)).await;
        let mut state = HealthState::default();
        loop {
            let next = Instant::now() + period;
            let result = match timeout(limit, self.check(mark)).await {
                Ok(result) => result,
                Err(_) => Err(anyhow::anyhow!("no answer within {limit:?}")),
            };
            if state.record(&self, result.is_ok()) {
                let error = result.err().map(|error| format!("{error:#}"));
                tracing::info!(healthy = error.is_none(), error, "health of the workload");
                configuration.report_health(error);
            }
            sleep_until(next).await;
        }
    }

    async fn check(&self, mark: Option<u32>) -> anyhow::Result<()> {
        let mut target = CheckTarget::local(mark);
        let hosts =
            [self.http_get.as_ref().map(|http| &http.host), self.tcp_socket.as_ref().map(|tcp| &tcp.host)];
        if let Some(host) = hosts.into_iter().flatten().find(|host| !host.is_empty()) {
            target.host.clone_from(host);
        }
        if let Some(http) = &self.http_get {
            let status = checks::http(http, &Method::GET, &target).await?.status.as_u16();
            ensure!((200..400).contains(&status), "the response has status {status}");
            return Ok(());
        }
        if let Some(tcp) = &self.tcp_socket {
            return checks::socket(tcp.port, &target).await;
        }
        if let Some(grpc) = &self.grpc {
            return checks::grpc(grpc, &target).await;
        }
        match &self.exec {
            Some(exec) => check_command(&exec.command).await,
            None => bail!("the probe has no method"),
        }
    }
}

async fn check_command(command: &[String]) -> anyhow::Result<()> {
    let (program, arguments) = command.split_first().context("the command is empty")?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = command.process_group(0).kill_on_drop(true).spawn();
    let mut child = started.with_context(|| format!("starting {program}"))?;
    // A check that takes too long is ended, with all processes that it has started.
    let group = ProcessGroup::new(child.id());
    let status = child.wait().await.with_context(|| format!("waiting for {program}"))?;
    group.release();
    ensure!(status.success(), "{program} ended with {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::{sys::stat::Mode, unistd::mkfifo};
    use skysail_core::confine::{self, Children};
    use tokio::{fs::File, io::AsyncReadExt as _, runtime};

    use super::*;

    /// The filter of system calls of the program stays for the lifetime of the thread.
    #[test]
    fn a_command_that_takes_too_long_ends_with_all_processes_that_it_has_started() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        let script = format!("(echo started; sleep 20; echo survived) > {} & wait", pipe.display());
        let command = ["/bin/sh", "-c", &script].map(str::to_owned);
        let test = async move {
            // The end of the pipe comes when its last writer has ended.
            let (mut output, mut text) = (None, String::new());
            tokio::select! {
                result = check_command(&command) => panic!("{result:?}"),
                () = async {
                    let opened = output.insert(File::open(&pipe).await.unwrap());
                    while !text.contains('\n') {
                        text.push(opened.read_u8().await.unwrap().into());
                    }
                } => {}
            }
            output.unwrap().read_to_string(&mut text).await.unwrap();
            assert_eq!(text, "started\n");
        };
        let confined = std::thread::spawn(|| {
            confine::process(Children::Programs).unwrap();
            runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
        });
        confined.join().unwrap();
    }

    #[test]
    fn thresholds_decide_what_is_reported() {
        let probe: Probe = serde_json::from_str(r#"{"successThreshold": 2, "failureThreshold": 2}"#).unwrap();
        let mut state = HealthState::default();
        let results = [true, true, true, false, true, false, false, false, true, true];
        let reports: Vec<bool> = results.iter().map(|is_good| state.record(&probe, *is_good)).collect();
        assert_eq!(reports, [false, true, false, false, false, false, true, false, false, true]);
        let mut state = HealthState::default();
        let reports = [false; 4].map(|is_good| state.record(&Probe::default(), is_good));
        assert_eq!(reports, [false, false, true, false], "the default is 3");
    }
}
