//! `skysail status`: the pods of a running mesh, or which proxies have an object of the configuration in effect.

use std::{
    env,
    ffi::OsString,
    fs,
    str::FromStr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skysail_core::{fingerprint, stdio};
use skysail_sandbox::{
    enter, http,
    rundir::{self, PodState},
};

use crate::{exit, view};

/// Timeout of a request to the control plane.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of requests while waiting.
const POLL: Duration = Duration::from_millis(100);

/// Arguments of `skysail status`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skysail status                                            the pods of the running mesh
  skysail status virtualservice/reviews -n shop             the proxies that hold its routes
  skysail status virtualservice/reviews -n shop --wait      the same when all of them have answered
  skysail status gateway.networking.istio.io/edge --output json

The exit code is 0 if all pods are ready, or if the object is in effect or unused; otherwise 1.")]
pub(crate) struct StatusArgs {
    /// Object of the configuration: KIND/NAME, or KIND.GROUP/NAME if two groups have the kind.
    object: Option<ObjectName>,
    /// Namespace of the object.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default", requires = "object")]
    namespace: String,
    /// Wait until the control plane has read the last change of the object's file and all proxies have answered.
    #[arg(short, long, requires = "object")]
    wait: bool,
    /// Time limit of --wait, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "wait")]
    timeout: u64,
    /// Admin address of the control plane [default: that of the running mesh].
    #[arg(long, value_name = "HOST:PORT", requires = "object")]
    control: Option<String>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: view::Output,
    /// Name of the mesh, if several are running.
    #[arg(long)]
    name: Option<String>,
}

/// Kind and name of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ObjectName {
    kind: String,
    name: String,
}

impl FromStr for ObjectName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((kind, name)) if !kind.is_empty() && is_name(kind) && !name.is_empty() && is_name(name) => {
                Ok(Self { kind: kind.to_owned(), name: name.to_owned() })
            }
            _ => Err("write KIND/NAME, such as virtualservice/reviews".to_owned()),
        }
    }
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
}

/// Response of the control plane; `docs/object-status.md` lists the fields.
#[derive(Debug, Deserialize)]
struct ObjectPage {
    kind: String,
    namespace: String,
    name: String,
    state: ObjectState,
    file: String,
    line: u32,
    fingerprint: Option<u64>,
    findings: Vec<ObjectFinding>,
    #[serde(default)]
    conditions: Vec<ConditionOfObject>,
    #[serde(default)]
    listeners: Vec<ListenerOfObject>,
    attached_listener_sets: Option<usize>,
    addresses: Option<Vec<String>>,
    acknowledged: usize,
    sent: usize,
    pending: usize,
    refused: usize,
    resources: Vec<ObjectResource>,
    resources_omitted: usize,
    deliveries: Vec<ObjectDelivery>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum ObjectState {
    Invalid,
    Publishing,
    Refused,
    Pending,
    InEffect,
    Unused,
}

#[derive(Debug, Deserialize)]
struct ListenerOfObject {
    name: String,
    attached_routes: usize,
    supported_kinds: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct ObjectFinding {
    line: u32,
    severity: String,
    code: String,
    field: String,
    message: String,
}

#[derive(Debug, Deserialize)]
struct ConditionOfObject {
    r#type: String,
    status: bool,
    reason: String,
    message: String,
    #[serde(default)]
    about: String,
}

#[derive(Debug, Deserialize)]
struct ObjectResource {
    r#type: String,
    name: String,
}

#[derive(Debug, Deserialize)]
struct ObjectDelivery {
    proxy: String,
    state: String,
    error: Option<String>,
}

pub(crate) fn run(args: &StatusArgs) -> anyhow::Result<u8> {
    match (&args.object, &args.control) {
        (None, _) => pods(args),
        (Some(object), Some(control)) => show(args, object, control),
        (Some(object), None) => beside_control(args, object),
    }
}

fn pods(args: &StatusArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    match args.output {
        view::Output::Json => stdio::print(serde_json::to_string_pretty(&view::status(&mesh))?)?,
        view::Output::Text => stdio::print(view::pods(&mesh))?,
    }
    Ok(exit::of(mesh.pods.iter().all(PodState::is_healthy)))
}

/// Runs this program again in the network namespace of the control plane.
fn beside_control(args: &StatusArgs, object: &ObjectName) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let exe = env::current_exe().context("cannot find this program's file")?;
    let output = match args.output {
        view::Output::Json => "json",
        view::Output::Text => "text",
    };
    let control = enter::control_address().to_string();
    let (object, timeout) = (format!("{}/{}", object.kind, object.name), args.timeout.to_string());
    let mut words = vec!["status", &object, "-n", &args.namespace, "--control", &control, "--output", output];
    if args.wait {
        words.extend(["--wait", "--timeout", &timeout]);
    }
    let command: Vec<_> = std::iter::once(exe.into()).chain(words.into_iter().map(OsString::from)).collect();
    Ok(enter::run(&mesh, enter::EnterTarget::Control, None, &command)?)
}

fn show(args: &StatusArgs, object: &ObjectName, control: &str) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let until = Instant::now() + Duration::from_secs(args.timeout);
    let path = format!("/debug/objects/{}/{}/{}", object.kind, args.namespace, object.name);
    let (text, page) = loop {
        let answer = runtime.block_on(request(control, &path))?;
        let is_last = !args.wait || Instant::now() >= until;
        match answer {
            Some((text, page)) if is_last || page.is_settled() => break (text, page),
            None if is_last => bail!(
                "the configuration has no {} {}/{}; {control}/debug/objects lists all objects",
                object.kind,
                args.namespace,
                object.name
            ),
            _ => runtime.block_on(async { tokio::time::sleep(POLL).await }),
        }
    };
    match args.output {
        view::Output::Json => {
            stdio::print(serde_json::to_string_pretty(&serde_json::from_str::<Value>(&text)?)?)?;
        }
        view::Output::Text => stdio::print(page.text())?,
    }
    Ok(exit::of(matches!(page.state, ObjectState::InEffect | ObjectState::Unused)))
}

/// Requests the page of an object; `None` if there is no such object.
async fn request(control: &str, path: &str) -> anyhow::Result<Option<(String, ObjectPage)>> {
    let call = http::Call {
        method: "GET".to_owned(),
        url: format!("http://{control}{path}"),
        ..http::Call::default()
    };
    let (status, body) = http::call(&call, TIMEOUT).await.with_context(|| {
        format!("requesting {control}, which must be the admin address of a control plane")
    })?;
    match status {
        200 => {
            let page =
                serde_json::from_str(&body).context("cannot parse the response of the control plane")?;
            Ok(Some((body, page)))
        }
        404 => Ok(None),
        status => bail!("the control plane answered with status {status}: {}", body.trim()),
    }
}

impl ObjectPage {
    /// Returns whether all proxies have answered, and the control plane has read the last version of the file.
    fn is_settled(&self) -> bool {
        // The control plane may read files that this process does not see.
        let text = fs::read_to_string(&self.file).ok();
        let is_read = text.is_none_or(|text| self.fingerprint.is_none_or(|used| used == fingerprint(&text)));
        is_read && !matches!(self.state, ObjectState::Publishing | ObjectState::Pending)
    }

    fn text(&self) -> String {
        let state = match self.state {
            ObjectState::Invalid => "invalid: the last valid version stays in effect",
            ObjectState::Publishing => "publishing",
            ObjectState::Refused => "refused by proxies",
            ObjectState::Pending => "pending: not all proxies have answered",
            ObjectState::InEffect => "in effect",
            ObjectState::Unused => "no connected proxy holds a resource that it affects",
        };
        let mut text =
            format!("{} {}/{} ({}:{}): {state}", self.kind, self.namespace, self.name, self.file, self.line);
        for ObjectFinding { line, severity, code, field, message } in &self.findings {
            let field = if field.is_empty() { String::new() } else { format!("{field}: ") };
            text += &format!("\n  line {line}: {severity}: {field}{message} [{code}]");
        }
        for ConditionOfObject { r#type, status, reason, message, about } in &self.conditions {
            let about = if about.is_empty() { String::new() } else { format!("{about}: ") };
            text += &format!("\n  {about}{type} {status}: {reason}: {message}");
        }
        for ListenerOfObject { name, attached_routes, supported_kinds } in &self.listeners {
            let kinds =
                if supported_kinds.is_empty() { "none".to_owned() } else { supported_kinds.join(", ") };
            text +=
                &format!("\n  listener {name}: {attached_routes} attached routes; kinds of routes: {kinds}");
        }
        if let Some(count) = self.attached_listener_sets {
            text += &format!("\n  attached ListenerSets: {count}");
        }
        match self.addresses.as_deref() {
            None => {}
            Some([]) => text += "\n  addresses: none known",
            Some(addresses) => text += &format!("\n  addresses: {}", addresses.join(", ")),
        }
        if !self.deliveries.is_empty() {
            text += &format!(
                "\n  proxies: {} acknowledged, {} sent, {} pending, {} refused",
                self.acknowledged, self.sent, self.pending, self.refused
            );
        }
        for ObjectResource { r#type, name } in &self.resources {
            text += &format!("\n  {type} {name}");
        }
        if self.resources_omitted > 0 {
            text += &format!("\n  and {} more resources", self.resources_omitted);
        }
        if self.deliveries.is_empty() {
            return text;
        }
        let rows = self.deliveries.iter().map(|ObjectDelivery { proxy, state, error }| {
            [proxy.clone(), state.clone(), error.clone().unwrap_or_default()]
        });
        text + "\n\n" + &view::deliveries(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_named_by_kind_and_name() {
        let named = |text: &str| text.parse::<ObjectName>().map(|of| (of.kind, of.name));
        assert_eq!(named("VirtualService/a"), Ok(("VirtualService".into(), "a".into())));
        assert_eq!(
            named("gateway.networking.istio.io/a.b"),
            Ok(("gateway.networking.istio.io".into(), "a.b".into()))
        );
        for wrong in ["", "a", "/a", "a/", "a/b/c", "a/b?c", "a b/c"] {
            assert!(named(wrong).is_err(), "{wrong}");
        }
    }
}
