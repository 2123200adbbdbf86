//! `skysail ca`: state of the certificate authority, and rotation of its root.

use std::{
    ffi::OsString,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use skysail_core::stdio;
use skysail_sandbox::{enter, http, rundir};

use crate::{exit, view};

/// Timeout of a request to the control plane.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Arguments of `skysail ca`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum CaArgs {
    /// Show the trusted root certificates and the state of their rotation.
    #[command(
        after_help = "The exit code is 1 if the authority in --ca-dir or in its Secret cannot be used or changed."
    )]
    Status(CaOptions),
    /// Start to rotate the root certificate of a self-signed authority. The rotation takes three times the lifetime of
    /// a certificate and interrupts no traffic.
    Rotate(CaOptions),
}

/// The authority, and the output format.
#[derive(Debug, clap::Args)]
pub(crate) struct CaOptions {
    /// Admin address of the control plane [default: that of the running mesh].
    #[arg(long, value_name = "HOST:PORT")]
    control: Option<String>,
    /// Name of the mesh, if several are running.
    #[arg(long)]
    name: Option<String>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: view::Output,
}

/// Response of the control plane; `docs/scripting.md` lists the fields.
#[derive(Debug, Serialize, Deserialize)]
struct CaStatus {
    kind: String,
    step: String,
    since: u64,
    until: Option<u64>,
    waits_for: String,
    problem: Option<String>,
    not_after: u64,
    roots: Vec<Root>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Root {
    name: String,
    serial: String,
    not_after: u64,
    signs: bool,
    trusted: bool,
}

pub(crate) fn run(args: CaArgs) -> anyhow::Result<u8> {
    let (verb, options) = match args {
        CaArgs::Status(options) => ("status", options),
        CaArgs::Rotate(options) => ("rotate", options),
    };
    let Some(control) = options.control else {
        return beside_control(verb, &options);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if verb == "rotate" {
        runtime.block_on(request("POST", &control, "/ca/rotate"))?;
    }
    let text = runtime.block_on(request("GET", &control, "/debug/ca"))?;
    let status: CaStatus =
        serde_json::from_str(&text).context("cannot parse the response of the control plane")?;
    match options.output {
        view::Output::Json => stdio::print(serde_json::to_string_pretty(&status)?)?,
        view::Output::Text => stdio::print(status.text(SystemTime::now()))?,
    }
    Ok(exit::of(status.problem.is_none()))
}

/// Runs this program again in the network namespace of the control plane.
fn beside_control(verb: &str, options: &CaOptions) -> anyhow::Result<u8> {
    let mesh = rundir::find(options.name.as_deref())?;
    let exe = std::env::current_exe().context("cannot find this program's file")?;
    let output = match options.output {
        view::Output::Json => "json",
        view::Output::Text => "text",
    };
    let control = enter::control_address().to_string();
    let words = ["ca", verb, "--control", &control, "--output", output];
    let command: Vec<_> = std::iter::once(exe.into()).chain(words.map(OsString::from)).collect();
    Ok(enter::run(&mesh, enter::EnterTarget::Control, None, &command)?)
}

async fn request(method: &str, control: &str, path: &str) -> anyhow::Result<String> {
    let url = format!("http://{control}{path}");
    // Some servers refuse a POST without a length.
    let body = (method == "POST").then(Default::default);
    let call = http::Call { method: method.to_owned(), url, body, ..http::Call::default() };
    let (status, body) = http::call(&call, TIMEOUT).await.with_context(|| {
        format!("requesting {control}, which must be the admin address of a control plane")
    })?;
    if status != 200 {
        bail!("the control plane answered with status {status}: {}", body.trim());
    }
    Ok(body)
}

impl CaStatus {
    fn text(&self, now: SystemTime) -> String {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut text = format!(
            "{}, {} for {}, waits for {}",
            self.kind,
            self.step,
            view::time(now.saturating_sub(self.since)),
            self.waits_for
        );
        if let Some(until) = self.until {
            text += &format!(", {} from now", view::time(until.saturating_sub(now)));
        }
        if let Some(problem) = &self.problem {
            text += &format!("\nnot in effect: {problem}");
        }
        let row = |root: &Root| {
            let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
            let left = view::time(root.not_after.saturating_sub(now));
            [root.name.clone(), root.serial.clone(), yes(root.signs), yes(root.trusted), left]
        };
        text + "\n\n" + &view::roots(self.roots.iter().map(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_the_next_step() {
        let root = |name: &str, signs, trusted| Root {
            name: name.into(),
            serial: "01".into(),
            not_after: 1000 + 90 * 60,
            signs,
            trusted,
        };
        let status = CaStatus {
            kind: "self-signed".into(),
            step: "issue".into(),
            since: 940,
            until: Some(1000 + 3 * 24 * 3600),
            waits_for: "the last certificate of the former root to expire".into(),
            problem: None,
            not_after: 0,
            roots: vec![root("CN=new", true, true), root("CN=old", false, true)],
        };
        let text = status.text(SystemTime::UNIX_EPOCH + Duration::from_secs(1000));
        let first = "self-signed, issue for 60s, waits for the last certificate of the former root to expire, 3d from now\n";
        assert!(text.starts_with(first), "{text}");
        assert!(text.contains("CN=old") && text.contains("90m"), "{text}");
    }
}
