//! Writes a service graph as YAML of isotope. [`format::parse`](super::format::parse) reads the same graph from it.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{
    model::{GraphProtocol, GraphService, ScriptCommand, ServiceCall, ServiceGraph},
    value,
};

/// Words that are no text in YAML 1.1.
const RESERVED: [&str; 10] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan"];

/// Returns the YAML of a graph. A value that all services share is in `defaults`.
pub(super) fn yaml(graph: &ServiceGraph) -> String {
    let (mut text, mut defaults) = (String::new(), String::new());
    let calls = || graph.services.iter().flat_map(GraphService::calls);
    let request_size = shared(calls().map(|call| call.size)).filter(|size| *size > 0);
    let services: Vec<Vec<String>> = graph.services.iter().map(scalars).collect();
    let common = services.first().map_or(&[][..], |first| first);
    let common: Vec<&String> =
        common.iter().filter(|line| services.iter().all(|lines| lines.contains(line))).collect();
    for line in &common {
        let _ = writeln!(defaults, "  {line}");
    }
    if let Some(size) = request_size {
        let _ = writeln!(defaults, "  requestSize: {}", value::write_size(size));
    }
    if !defaults.is_empty() {
        let _ = write!(text, "defaults:\n{defaults}");
    }
    text.push_str("services:\n");
    for (service, lines) in graph.services.iter().zip(&services) {
        let _ = writeln!(text, "- name: {}", scalar(&service.name));
        for (key, value) in [("namespace", &service.namespace), ("cluster", &service.cluster)] {
            if let Some(value) = value {
                let _ = writeln!(text, "  {key}: {}", scalar(value));
            }
        }
        map(&mut text, "  ", "labels", &service.labels);
        if service.is_entry_point {
            text.push_str("  isEntrypoint: true\n");
        }
        for line in lines.iter().filter(|line| !common.contains(line)) {
            let _ = writeln!(text, "  {line}");
        }
        if !service.script.is_empty() {
            text.push_str("  script:\n");
        }
        for step in &service.script {
            let mut lead = if step.len() == 1 { "  - " } else { "  - - " };
            for command in step {
                self::command(&mut text, lead, command, request_size);
                lead = "    - ";
            }
        }
    }
    text
}

/// Returns the fields of a service that may be defaults and do not have the value of the format.
fn scalars(service: &GraphService) -> Vec<String> {
    let mut lines = Vec::new();
    if service.protocol != GraphProtocol::default() {
        lines.push(format!("type: {}", service.protocol.name()));
    }
    if service.replicas != 1 {
        lines.push(format!("numReplicas: {}", service.replicas));
    }
    if service.error_percent != 0.0 {
        lines.push(format!("errorRate: {}%", service.error_percent));
    }
    if service.response_size != 0 {
        lines.push(format!("responseSize: {}", value::write_size(service.response_size)));
    }
    if service.policies != 0 {
        lines.push(format!("numRbacPolicies: {}", service.policies));
    }
    lines
}

fn command(text: &mut String, lead: &str, command: &ScriptCommand, request_size: Option<u64>) {
    match command {
        ScriptCommand::Sleep(duration) => {
            let _ = writeln!(text, "{lead}sleep: {}", value::write_duration(*duration));
        }
        ScriptCommand::Call(call) if is_plain(call, request_size) => {
            let _ = writeln!(text, "{lead}call: {}", scalar(&call.service));
        }
        ScriptCommand::Call(call) => {
            let indent = " ".repeat(lead.len() + 4);
            let _ = writeln!(text, "{lead}call:\n{indent}service: {}", scalar(&call.service));
            if Some(call.size) != request_size {
                let _ = writeln!(text, "{indent}size: {}", value::write_size(call.size));
            }
            if let Some(hostname) = &call.hostname {
                let _ = writeln!(text, "{indent}hostname: {}", scalar(hostname));
            }
            if !call.is_certain() {
                let _ = writeln!(text, "{indent}probability: {}", call.probability);
            }
            map(text, &indent, "extra-header", &call.headers);
        }
    }
}

/// Returns whether a call can be written as the name of its service.
fn is_plain(call: &ServiceCall, request_size: Option<u64>) -> bool {
    call.size == request_size.unwrap_or(0)
        && call.hostname.is_none()
        && call.headers.is_empty()
        && call.is_certain()
}

fn map(text: &mut String, indent: &str, key: &str, values: &BTreeMap<String, String>) {
    if values.is_empty() {
        return;
    }
    let _ = writeln!(text, "{indent}{key}:");
    for (name, value) in values {
        let _ = writeln!(text, "{indent}  {}: {}", scalar(name), scalar(value));
    }
}

/// Returns a text as a scalar: in quotes unless it is a word.
pub(super) fn scalar(text: &str) -> String {
    let is_word = text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
        && !RESERVED.contains(&text);
    if is_word { text.to_owned() } else { quoted(text) }
}

/// Returns a text in double quotes. JSON's strings are also YAML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Returns the value that all items have.
fn shared<T: PartialEq>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let first = items.next()?;
    items.all(|item| item == first).then_some(first)
}
