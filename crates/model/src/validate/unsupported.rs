//! Fields that the table of fields marks as refused, without effect, or deprecated.

use super::{Code, Finding, Findings};
use crate::{
    api::Kind,
    fields::{FieldRow, Marked, Support, marked},
};
use skysail_yaml::{Node, Value, join};

/// Reports the fields of an object that the table marks. A field is left out if another check has reported it or a part
/// of it (`found`), because that message is more specific.
pub(crate) fn unsupported(kind: Kind, root: &Node, found: &[Finding]) -> Vec<Finding> {
    root.get("spec").map_or_else(Vec::new, |spec| reported(kind, spec, "spec", found))
}

/// Reports the settings of the mesh configuration that the table marks.
pub(crate) fn unsupported_settings(root: &Node, found: &[Finding]) -> Vec<Finding> {
    let mut findings = reported(Kind::ConfigMap, root, "", found);
    let fields = findings.iter_mut().filter(|finding| finding.code == Code::UnsupportedField);
    fields.for_each(|finding| finding.code = Code::UnsupportedSetting);
    findings
}

fn reported(kind: Kind, value: &Node, field: &str, found: &[Finding]) -> Vec<Finding> {
    let mut findings = Findings::default();
    if let Some(table) = marked(kind) {
        search(value, field, (table, Marked::ROOT), &mut findings);
    }
    let covers = |other: &Finding, field: &str| {
        other.field.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    let is_new = |finding: &Finding| !found.iter().any(|other| covers(other, &finding.field));
    findings.done().into_iter().filter(is_new).collect()
}

/// Searches a value. `field` is its path with list positions, `at` its place in the table.
fn search(value: &Node, field: &str, at: (&Marked, usize), findings: &mut Findings) {
    let (table, node) = at;
    if is_default(&value.value) {
        return;
    }
    for row in table.reported(node).iter().filter(|row| row.value.is_none()) {
        report(row, field, findings);
    }
    within(value, field, at, findings);
}

/// Searches the fields of a value. Also reports the value itself if the table marks this value of its field.
fn within(value: &Node, field: &str, at: (&Marked, usize), findings: &mut Findings) {
    let (table, node) = at;
    match &value.value {
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                within(item, &format!("{field}[{index}]"), at, findings);
            }
        }
        Value::Map(entries) => {
            for entry in entries {
                if let Some(child) = table.child(node, &entry.key) {
                    search(&entry.value, &join(field, &entry.key), (table, child), findings);
                }
            }
        }
        _ => {
            let matches = |row: &&FieldRow| row.value.is_some() && row.value == value.text();
            table.reported(node).iter().filter(matches).for_each(|row| report(row, field, findings));
        }
    }
}

/// Returns whether a value is the same as an absent field.
fn is_default(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) | Value::Int(0) => true,
        Value::Text(text, _) => text.is_empty(),
        Value::List(items) => items.is_empty(),
        _ => false,
    }
}

fn report(row: &FieldRow, field: &str, findings: &mut Findings) {
    let what = row.value.map_or(String::new(), |value| format!("{value} "));
    let (effect, remedy) = row.effect();
    match row.support {
        Support::Deprecated => {
            findings.add(Code::Deprecated, field, format!("{what}is deprecated"), row.note);
        }
        Support::Refused => {
            findings.add(Code::Unsupported, field, format!("{what}is not supported: {effect}"), remedy);
        }
        _ => {
            let message = format!("{what}is not supported yet: {effect}");
            findings.add(Code::UnsupportedField, field, message, remedy);
        }
    }
}
