//! Converts a service graph to the DOT language of Graphviz.

use std::fmt::Write as _;

use super::{
    model::{GraphService, ScriptCommand, ServiceGraph},
    value,
};

/// Returns the graph as DOT. A node has the type, error rate and response size of its service, an edge the number of its
/// step, and probability and size of its call.
pub(super) fn convert(graph: &ServiceGraph) -> String {
    let mut text = "digraph {\n  node [shape=box];\n".to_owned();
    for service in &graph.services {
        let shape = if service.is_entry_point { ", peripheries=2" } else { "" };
        let _ = writeln!(text, "  \"{}\" [label=\"{}\"{shape}];", service.name, label(service));
    }
    for service in &graph.services {
        for (step, commands) in service.script.iter().enumerate() {
            for command in commands {
                let ScriptCommand::Call(call) = command else { continue };
                let share =
                    if !call.is_certain() { format!(", {} %", call.probability) } else { String::new() };
                let _ = writeln!(
                    text,
                    "  \"{}\" -> \"{}\" [label=\"{}: {}{share}\"];",
                    service.name,
                    call.service,
                    step + 1,
                    bytes(call.size)
                );
            }
        }
    }
    text.push_str("}\n");
    text
}

fn label(service: &GraphService) -> String {
    let mut label = format!("{}\\n{}", service.name, service.protocol.name());
    if service.replicas > 1 {
        let _ = write!(label, " × {}", service.replicas);
    }
    let _ = write!(label, ", {}", bytes(service.response_size));
    if service.error_percent > 0.0 {
        let _ = write!(label, "\\nerrors: {} %", service.error_percent);
    }
    for (step, commands) in service.script.iter().enumerate() {
        for command in commands {
            let ScriptCommand::Sleep(duration) = command else { continue };
            let _ = write!(label, "\\n{}: sleep {}", step + 1, value::write_duration(*duration));
        }
    }
    label
}

/// Writes a size with its unit.
fn bytes(bytes: u64) -> String {
    let size = value::write_size(bytes);
    if size.ends_with('B') { size } else { format!("{size} B") }
}
