//! Health check of the workload beside the sidecar, as Istio's agent runs it on machines: the probe is
//! `readinessProbe` of the proxy's settings in the node's metadata. Changes are reported to the control plane.
//!
//! Meanings and defaults are Istio's. An HTTP response is good if its status is from 200 to 399. Certificates are not
//! verified.

use std::{convert::Infallible, path::Path, process::Stdio, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rustls::pki_types::ServerName;
use serde::Deserialize;
use serde_json::Value;
use skysail_core::process_group::ProcessGroup;
use skysail_identity::TlsSpec;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    process::Command,
    time::{Instant, sleep, sleep_until, timeout},
};
use tonic::{Request, client::Grpc, codegen::http::uri::PathAndQuery};
use tonic_prost::ProstCodec;

use crate::discovery::{
    Configuration,
    remote::{Remote, RemoteAddress, connect_tcp},
};

/// Maximum size of the part of a response that is read: its first line.
const MAX_LINE: usize = 4 << 10;
/// Host of probes that name none.
const LOCAL: &str = "localhost";
const GRPC_CHECK: &str = "/grpc.health.v1.Health/Check";
/// `SERVING` of `grpc.health.v1.HealthCheckResponse.ServingStatus`.
const SERVING: i32 = 1;

/// Health check. Source: `istio.networking.v1.ReadinessProbe`. Zero stands for the default.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Probe {
    initial_delay_seconds: u32,
    timeout_seconds: u32,
    period_seconds: u32,
    success_threshold: u32,
    failure_threshold: u32,
    http_get: Option<HttpProbe>,
    tcp_socket: Option<SocketProbe>,
    exec: Option<ExecProbe>,
    grpc: Option<GrpcProbe>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct HttpProbe {
    path: String,
    port: u16,
    host: String,
    scheme: String,
    http_headers: Vec<ProbeHeader>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ProbeHeader {
    name: String,
    value: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SocketProbe {
    host: String,
    port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ExecProbe {
    command: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct GrpcProbe {
    port: u16,
    service: String,
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
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
    /// Reads the probe from the file of a node.
    ///
    /// # Errors
    /// The file cannot be read, or the probe is not valid.
    pub(crate) fn of_node(file: &Path) -> anyhow::Result<Option<Self>> {
        let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let node: Value = serde_json::from_slice(&text).with_context(|| file.display().to_string())?;
        let probe = &node["metadata"]["PROXY_CONFIG"]["readinessProbe"];
        if probe.is_null() {
            return Ok(None);
        }
        let context = || format!("{}: metadata.PROXY_CONFIG.readinessProbe", file.display());
        serde_json::from_value(probe.clone()).map(Some).with_context(context)
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
        let host = |host: &str| if host.is_empty() { LOCAL } else { host }.to_owned();
        if let Some(http) = &self.http_get {
            return check_http(http, &host(&http.host), mark).await;
        }
        if let Some(tcp) = &self.tcp_socket {
            connect_tcp(&host(&tcp.host), tcp.port, mark).await?;
            return Ok(());
        }
        if let Some(grpc) = &self.grpc {
            return check_grpc(grpc, mark).await;
        }
        match &self.exec {
            Some(exec) => check_command(&exec.command).await,
            None => bail!("the probe has no method"),
        }
    }
}

async fn check_http(http: &HttpProbe, host: &str, mark: Option<u32>) -> anyhow::Result<()> {
    let tcp = connect_tcp(host, http.port, mark).await?;
    if !http.scheme.eq_ignore_ascii_case("https") {
        return check_response(http, host, tcp).await;
    }
    let config = TlsSpec::default().client()?;
    let name = ServerName::try_from(host.to_owned())?;
    let stream = tokio_rustls::TlsConnector::from(config).connect(name, tcp).await?;
    check_response(http, host, stream).await
}

async fn check_response(
    http: &HttpProbe,
    host: &str,
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
) -> anyhow::Result<()> {
    let is_host = |header: &&ProbeHeader| header.name.eq_ignore_ascii_case("host");
    let host = http.http_headers.iter().find(is_host).map_or(host, |header| &header.value);
    let headers = http.http_headers.iter().flat_map(|header| [&*header.name, &*header.value]);
    let is_valid = !headers.chain([&*http.path, host]).any(|text| text.contains(char::is_control));
    ensure!(is_valid && !http.path.contains(' '), "the path or a header of the probe is not valid");
    let slash = if http.path.starts_with('/') { "" } else { "/" };
    let mut request = format!("GET {slash}{} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n", http.path);
    for ProbeHeader { name, value } in http.http_headers.iter().filter(|header| !is_host(header)) {
        request += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{request}\r\n").as_bytes()).await?;
    let mut line = Vec::new();
    while !line.contains(&b'\n') {
        ensure!(line.len() < MAX_LINE, "the response has no status");
        if stream.read_buf(&mut line).await? == 0 {
            bail!("the connection ended before the response");
        }
    }
    let line = String::from_utf8_lossy(&line).into_owned();
    let status = line.split(' ').nth(1).and_then(|status| status.trim().parse::<u16>().ok());
    match status {
        Some(200..400) => Ok(()),
        Some(status) => bail!("the response has status {status}"),
        None => bail!("the response has no status"),
    }
}

async fn check_grpc(grpc: &GrpcProbe, mark: Option<u32>) -> anyhow::Result<()> {
    let place = RemoteAddress::Tcp(LOCAL.to_owned(), grpc.port);
    let remote = Remote { place, tls: None, mark };
    let channel = remote.connect().await.map_err(|error| anyhow::anyhow!("{error}"))?;
    let mut client = Grpc::new(channel);
    client.ready().await?;
    let request = Request::new(HealthCheckRequest { service: grpc.service.clone() });
    let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    let response = client.unary(request, PathAndQuery::from_static(GRPC_CHECK), codec).await?;
    let status = response.into_inner().status;
    ensure!(status == SERVING, "the service has health status {status}");
    Ok(())
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
    use tokio::{fs::File, runtime};

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
