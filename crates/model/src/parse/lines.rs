//! Lines of objects and of their fields.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use skysail_yaml::{Node, Value, join};

use crate::{
    api::{Kind, Object},
    origin::{Lines, Origin},
};

/// Returns where an object was read. With `all_lines`, the lines of all its fields are kept.
pub(super) fn origin(file: &Arc<str>, node: &Node, object: &Object, all_lines: bool) -> Origin {
    let mut content = DefaultHasher::new();
    node.hash(&mut content);
    let generation = node.get("metadata").and_then(|metadata| metadata.get("generation"));
    Origin {
        file: Arc::clone(file),
        line: node.line,
        lines: lines_of(node, object, all_lines),
        content: content.finish(),
        generation: generation.and_then(|generation| generation.to_json().as_i64()).unwrap_or_default(),
    }
}

/// Returns the lines of the fields that are checked against other objects later: the service account of a template,
/// all fields of `spec` for some kinds. With `all`, returns those of all fields in `spec` and `data`.
fn lines_of(node: &Node, object: &Object, all: bool) -> Option<Arc<Lines>> {
    if let Object::Template(template) = object
        && !all
    {
        let field = template.spec.kind.account_field();
        return Some(Arc::new(Lines::from([(field.to_owned(), find_line(node, field))])));
    }
    let checked = all
        || matches!(
            object.kind(),
            Kind::Service
                | Kind::VirtualService
                | Kind::DestinationRule
                | Kind::ServiceEntry
                | Kind::PeerAuthentication
                | Kind::AuthorizationPolicy
                | Kind::RateLimitPolicy
                | Kind::WasmPlugin
                | Kind::TrafficExtension
        );
    checked.then(|| {
        let mut lines = Lines::new();
        for part in ["spec", "data"] {
            if let Some(spec) = node.get(part).filter(|_| all || part == "spec") {
                collect_lines(spec, part, spec.line, &mut lines);
            }
        }
        Arc::new(lines)
    })
}

fn collect_lines(node: &Node, path: &str, line: u32, lines: &mut Lines) {
    lines.insert(path.to_owned(), line);
    match &node.value {
        Value::Map(entries) => {
            for entry in entries {
                collect_lines(&entry.value, &join(path, &entry.key), entry.line, lines);
            }
        }
        Value::List(nodes) => {
            for (index, node) in nodes.iter().enumerate() {
                collect_lines(node, &format!("{path}[{index}]"), node.line, lines);
            }
        }
        _ => {}
    }
}

/// Returns the line of a field, or of the nearest enclosing one that is present.
pub(super) fn find_line(node: &Node, field: &str) -> u32 {
    fn search(node: &Node, path: &str, field: &str, best: &mut u32) {
        let inside = |at: &str| {
            field.strip_prefix(at).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        match &node.value {
            Value::Map(entries) => {
                for entry in entries {
                    let at = join(path, &entry.key);
                    if inside(&at) {
                        *best = entry.line;
                        search(&entry.value, &at, field, best);
                    }
                }
            }
            Value::List(nodes) => {
                for (index, node) in nodes.iter().enumerate() {
                    let at = format!("{path}[{index}]");
                    if inside(&at) {
                        *best = node.line;
                        search(node, &at, field, best);
                    }
                }
            }
            _ => {}
        }
    }
    let mut line = node.line;
    search(node, "", field, &mut line);
    line
}
