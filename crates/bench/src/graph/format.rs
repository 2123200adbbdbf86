//! Reads the YAML of isotope (istio/tools, `isotope/`). Every field is read or refused by name.
//!
//! An error begins with the line and the field, and names the remedy.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context as _;
use http::{HeaderName, HeaderValue};
use skysail_yaml::{Node, Value};

use super::{
    check::{self, CallSite},
    model::{CERTAIN, GraphProtocol, GraphService, ScriptCommand, ServiceCall, ServiceGraph},
    value,
};
use crate::{document, results};

/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 16 << 20;
/// Maximum number of services.
pub(super) const MAX_SERVICES: usize = 10_000;
/// Maximum number of replicas of a service.
const MAX_REPLICAS: u32 = 10_000;
/// Maximum number of policies of a service.
const MAX_POLICIES: u32 = 1_000;
/// Fields that isotope's documents or earlier versions mention, with the remedy.
const REFUSED: [(&str, &str); 6] = [
    ("default", "isotope reads `defaults`; rename the field"),
    ("call-override", "isotope reads `hostname`; rename the field"),
    ("payloadSize", "isotope reads `size`; rename the field"),
    ("computeUsage", "isotope does not implement it; remove it, and use `sleep` for processing time"),
    ("memoryUsage", "isotope does not implement it; remove it"),
    ("requestSize", "it is a default of all calls; move it to `defaults`, or write `size` in a call"),
];
/// Headers that the client of the mock service sets itself.
const OWN_HEADERS: [&str; 4] = ["host", "content-length", "connection", "transfer-encoding"];

/// Reads a file.
///
/// # Errors
/// The file cannot be read, or as for [`parse`].
pub(super) fn read(file: &Path) -> anyhow::Result<ServiceGraph> {
    let text = results::read_text(file, MAX_FILE)
        .with_context(|| format!("cannot read the service graph {}", file.display()))?;
    parse(&text).map_err(|error| anyhow::anyhow!("{}:{error}", file.display()))
}

/// Parses a text. An error begins with the number of the line.
pub(super) fn parse(text: &str) -> Result<ServiceGraph, String> {
    let root = document::parse(text, "service graph")?;
    let fields = Fields::of(&root, "", &["apiVersion", "kind", "defaults", "services"])?;
    fields.fixed("apiVersion", "v1alpha1")?;
    fields.fixed("kind", "MockServiceGraph")?;
    let mut reader = Reader { request_size: 0, calls: Vec::new() };
    let defaults = reader.defaults(&fields)?;
    let (node, path) = fields.required("services")?;
    let nodes = list(node, &path)?;
    if nodes.is_empty() || nodes.len() > MAX_SERVICES {
        return Err(error(node, &path, &format!("must have 1 to {MAX_SERVICES} services")));
    }
    let mut services = Vec::with_capacity(nodes.len());
    for (at, node) in nodes.iter().enumerate() {
        services.push(reader.service(node, &format!("{path}[{at}]"), &defaults, at)?);
    }
    let graph = ServiceGraph { services };
    check::names(&graph, nodes)?;
    check::entry_point(&graph, node.line)?;
    check::calls(&graph, &reader.calls)?;
    Ok(graph)
}

/// State of a reader: the default size of requests, and where calls are.
struct Reader {
    request_size: u64,
    calls: Vec<CallSite>,
}

/// Defaults of services.
#[derive(Clone, Default)]
struct Defaults {
    protocol: GraphProtocol,
    replicas: Option<u32>,
    error_percent: f64,
    response_size: u64,
    policies: u32,
    /// Script with the places of its calls.
    script: (Vec<Vec<ScriptCommand>>, Vec<CallSite>),
}

impl Reader {
    fn defaults(&mut self, root: &Fields<'_>) -> Result<Defaults, String> {
        let Some((node, path)) = root.get("defaults") else { return Ok(Defaults::default()) };
        let known =
            ["type", "errorRate", "requestSize", "responseSize", "script", "numReplicas", "numRbacPolicies"];
        let fields = Fields::of(node, &path, &known)?;
        self.request_size = fields.read("requestSize", size)?.unwrap_or(0);
        let script = fields.read("script", |node, path| self.script(node, path))?.unwrap_or_default();
        let calls = std::mem::take(&mut self.calls);
        Ok(Defaults {
            protocol: fields.read("type", protocol)?.unwrap_or_default(),
            replicas: fields.read("numReplicas", replicas)?,
            error_percent: fields.read("errorRate", percent)?.unwrap_or(0.0),
            response_size: fields.read("responseSize", size)?.unwrap_or(0),
            policies: fields.read("numRbacPolicies", policies)?.unwrap_or(0),
            script: (script, calls),
        })
    }

    fn service(
        &mut self,
        node: &Node,
        path: &str,
        defaults: &Defaults,
        at: usize,
    ) -> Result<GraphService, String> {
        let known = [
            "name",
            "namespace",
            "cluster",
            "labels",
            "type",
            "numReplicas",
            "isEntrypoint",
            "errorRate",
            "responseSize",
            "numRbacPolicies",
            "script",
        ];
        let fields = Fields::of(node, path, &known)?;
        let (name, name_path) = fields.required("name")?;
        let first = self.calls.len();
        let script = match fields.read("script", |node, path| self.script(node, path))? {
            Some(script) => script,
            None => {
                self.calls.extend(defaults.script.1.iter().cloned());
                defaults.script.0.clone()
            }
        };
        self.calls[first..].iter_mut().for_each(|call| call.caller = at);
        let labels = fields.read("labels", texts)?.unwrap_or_default();
        Ok(GraphService {
            name: label(name, &name_path)?,
            namespace: fields.read("namespace", label)?,
            cluster: fields.read("cluster", label)?,
            labels,
            protocol: fields.read("type", protocol)?.unwrap_or(defaults.protocol),
            replicas: fields.read("numReplicas", replicas)?.or(defaults.replicas).unwrap_or(1),
            is_entry_point: fields.read("isEntrypoint", truth)?.unwrap_or(false),
            error_percent: fields.read("errorRate", percent)?.unwrap_or(defaults.error_percent),
            response_size: fields.read("responseSize", size)?.unwrap_or(defaults.response_size),
            policies: fields.read("numRbacPolicies", policies)?.unwrap_or(defaults.policies),
            script,
        })
    }

    fn script(&mut self, node: &Node, path: &str) -> Result<Vec<Vec<ScriptCommand>>, String> {
        let mut steps = Vec::new();
        for (at, step) in list(node, path)?.iter().enumerate() {
            let path = format!("{path}[{at}]");
            let Value::List(commands) = &step.value else {
                steps.push(vec![self.command(step, &path)?]);
                continue;
            };
            if commands.is_empty() {
                return Err(error(step, &path, "the step has no command; remove it"));
            }
            let mut concurrent = Vec::with_capacity(commands.len());
            for (at, command) in commands.iter().enumerate() {
                let path = format!("{path}[{at}]");
                if matches!(command.value, Value::List(_)) {
                    let reason = "the commands of a step run concurrently and must not be lists; write its commands directly";
                    return Err(error(command, &path, reason));
                }
                concurrent.push(self.command(command, &path)?);
            }
            steps.push(concurrent);
        }
        Ok(steps)
    }

    fn command(&mut self, node: &Node, path: &str) -> Result<ScriptCommand, String> {
        let fields = Fields::of(node, path, &["sleep", "call"])?;
        match (fields.get("sleep"), fields.get("call")) {
            (Some((node, path)), None) => sleep(node, &path),
            (None, Some((node, path))) => self.call(node, &path).map(ScriptCommand::Call),
            (Some(_), Some(_)) => Err(error(
                node,
                path,
                "a command is either `sleep` or `call`; write two steps, or a list of both to run them concurrently",
            )),
            (None, None) => Err(error(node, path, "a command must have `sleep` or `call`")),
        }
    }

    fn call(&mut self, node: &Node, path: &str) -> Result<ServiceCall, String> {
        let call = if node.text().is_some() {
            ServiceCall {
                service: text(node, path)?,
                size: self.request_size,
                hostname: None,
                headers: BTreeMap::new(),
                probability: CERTAIN,
            }
        } else {
            let known = ["service", "size", "hostname", "extra-header", "probability"];
            let fields = Fields::of(node, path, &known)?;
            let (service, service_path) = fields.required("service")?;
            ServiceCall {
                service: text(service, &service_path)?,
                size: fields.read("size", size)?.unwrap_or(self.request_size),
                hostname: fields.read("hostname", hostname)?,
                headers: fields.read("extra-header", headers)?.unwrap_or_default(),
                probability: fields.read("probability", probability)?.unwrap_or(CERTAIN),
            }
        };
        self.calls.push(CallSite {
            caller: 0,
            callee: call.service.clone(),
            line: node.line,
            field: path.to_owned(),
        });
        Ok(call)
    }
}

/// A mapping whose keys are known.
struct Fields<'a> {
    node: &'a Node,
    path: String,
}

impl<'a> Fields<'a> {
    /// Fails if the node is no mapping or has a key that is not listed.
    fn of(node: &'a Node, path: &str, known: &[&str]) -> Result<Self, String> {
        let Value::Map(entries) = &node.value else {
            return Err(error(node, path, &format!("must be a mapping with {}", known.join(", "))));
        };
        if let Some(entry) = entries.iter().find(|entry| !known.contains(&entry.key.as_str())) {
            let refused = REFUSED.iter().find(|(name, _)| *name == entry.key);
            let reason = refused.map_or_else(
                || format!("unknown field; the fields are {}", known.join(", ")),
                |(_, reason)| (*reason).to_owned(),
            );
            return Err(message(entry.line, &skysail_yaml::join(path, &entry.key), &reason));
        }
        Ok(Self { node, path: path.to_owned() })
    }

    /// Returns a value with its path; `None` if it is absent or null.
    fn get(&self, key: &str) -> Option<(&'a Node, String)> {
        let node = self.node.get(key).filter(|node| node.value != Value::Null)?;
        Some((node, skysail_yaml::join(&self.path, key)))
    }

    fn required(&self, key: &str) -> Result<(&'a Node, String), String> {
        self.get(key).ok_or_else(|| error(self.node, &self.path, &format!("must have `{key}`")))
    }

    fn read<T>(
        &self,
        key: &str,
        read: impl FnOnce(&'a Node, &str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        self.get(key).map(|(node, path)| read(node, &path)).transpose()
    }

    /// Checks a field that has only one value.
    fn fixed(&self, key: &str, expected: &str) -> Result<(), String> {
        match self.get(key) {
            Some((node, path)) if node.text() != Some(expected) => {
                Err(error(node, &path, &format!("must be {expected}; write it, or remove the field")))
            }
            _ => Ok(()),
        }
    }
}

fn message(line: u32, path: &str, reason: &str) -> String {
    if path.is_empty() { format!("{line}: {reason}") } else { format!("{line}: {path}: {reason}") }
}

fn error(node: &Node, path: &str, reason: &str) -> String {
    message(node.line, path, reason)
}

fn list<'a>(node: &'a Node, path: &str) -> Result<&'a [Node], String> {
    match &node.value {
        Value::List(nodes) => Ok(nodes),
        _ => Err(error(node, path, "must be a list; write each item after `- `")),
    }
}

fn text(node: &Node, path: &str) -> Result<String, String> {
    let text = node.text().map(str::to_owned);
    text.ok_or_else(|| error(node, path, "must be text; write it in quotes if it is one"))
}

fn label(node: &Node, path: &str) -> Result<String, String> {
    let text = text(node, path)?;
    let is_label = text.starts_with(|c: char| c.is_ascii_lowercase())
        && !text.ends_with('-')
        && text.len() <= 63
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
    if is_label {
        return Ok(text);
    }
    let reason = format!(
        "{text:?} must be 1 to 63 lower-case letters, digits and hyphens, begin with a letter, and not end with a hyphen"
    );
    Err(error(node, path, &reason))
}

fn truth(node: &Node, path: &str) -> Result<bool, String> {
    match node.value {
        Value::Bool(truth) => Ok(truth),
        _ => Err(error(node, path, "must be true or false")),
    }
}

fn whole(node: &Node, path: &str, min: u32, max: u32, remedy: &str) -> Result<u32, String> {
    let number = match node.value {
        Value::Int(number) => u32::try_from(number).ok(),
        _ => None,
    };
    let invalid = || error(node, path, &format!("must be a whole number from {min} to {max}{remedy}"));
    number.filter(|number| (min..=max).contains(number)).ok_or_else(invalid)
}

fn replicas(node: &Node, path: &str) -> Result<u32, String> {
    whole(node, path, 1, MAX_REPLICAS, "")
}

fn policies(node: &Node, path: &str) -> Result<u32, String> {
    whole(node, path, 0, MAX_POLICIES, "")
}

fn probability(node: &Node, path: &str) -> Result<f64, String> {
    let percent = match node.value {
        Value::Int(number) => Some(number as f64),
        Value::Float(number) => Some(number),
        _ => None,
    };
    percent.filter(|percent| *percent > 0.0 && *percent <= CERTAIN).ok_or_else(|| {
        error(
            node,
            path,
            "must be a number above 0 and at most 100; a call without `probability` is always made",
        )
    })
}

fn protocol(node: &Node, path: &str) -> Result<GraphProtocol, String> {
    match node.text() {
        Some("http") => Ok(GraphProtocol::Http),
        Some("grpc") => Ok(GraphProtocol::Grpc),
        _ => Err(error(node, path, "must be http or grpc")),
    }
}

fn size(node: &Node, path: &str) -> Result<u64, String> {
    let size = match &node.value {
        Value::Int(number) => value::bounded_size(*number as f64),
        Value::Text(text, _) => value::size(text),
        _ => Err("must be a size; write bytes, or a size such as 10K, 1 KB or 1.5 MiB".to_owned()),
    };
    size.map_err(|reason| error(node, path, &reason))
}

fn percent(node: &Node, path: &str) -> Result<f64, String> {
    let fraction = match &node.value {
        Value::Int(number) => *number as f64,
        Value::Float(number) => *number,
        Value::Text(text, _) => return value::percentage(text).map_err(|reason| error(node, path, &reason)),
        _ => f64::NAN,
    };
    if (0.0..=1.0).contains(&fraction) {
        return Ok(fraction * 100.0);
    }
    Err(error(node, path, "must be a percentage such as 0.1%, or a number from 0 to 1"))
}

fn sleep(node: &Node, path: &str) -> Result<ScriptCommand, String> {
    let Some(text) = node.text() else {
        let reason = "must be a duration such as 10ms; distributions of isotope's earlier versions are not supported, write \
                      their mean";
        return Err(error(node, path, reason));
    };
    value::sleep(text).map(ScriptCommand::Sleep).map_err(|reason| error(node, path, &reason))
}

fn hostname(node: &Node, path: &str) -> Result<String, String> {
    let text = text(node, path)?;
    let (host, port) = text.rsplit_once(':').unwrap_or((&text, "80"));
    let is_valid = !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
        && port.parse::<u16>().is_ok_and(|port| port > 0);
    if is_valid {
        return Ok(text);
    }
    Err(error(
        node,
        path,
        &format!("{text:?} must be a host name, or a host name and a port (`b.shop:8080`)"),
    ))
}

fn texts(node: &Node, path: &str) -> Result<BTreeMap<String, String>, String> {
    let Value::Map(entries) = &node.value else {
        return Err(error(node, path, "must be a mapping of names to texts"));
    };
    let read = |entry: &skysail_yaml::Entry| {
        Ok((entry.key.clone(), text(&entry.value, &skysail_yaml::join(path, &entry.key))?))
    };
    entries.iter().map(read).collect()
}

fn headers(node: &Node, path: &str) -> Result<BTreeMap<String, String>, String> {
    let headers = texts(node, path)?;
    for (name, value) in &headers {
        let path = skysail_yaml::join(path, name);
        if HeaderName::from_bytes(name.as_bytes()).is_err() || HeaderValue::from_str(value).is_err() {
            return Err(error(node, &path, "is not a header of HTTP; correct its name or value"));
        }
        if OWN_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
            return Err(error(node, &path, "the mock service sets this header itself; remove it"));
        }
    }
    Ok(headers)
}
