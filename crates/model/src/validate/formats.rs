//! Validation of texts that proxies parse: CEL expressions and texts with command operators. A proxy refuses the whole
//! listener or route of an invalid one, so the object is refused first. An invalid format of an access log is replaced by
//! the default one.

use std::collections::BTreeSet;

use serde_json::Value;
use skysail_policy::{
    expression::Expression,
    operators::{self, Operator, OperatorSupport, Piece},
};

use super::{Code, Findings};

/// Maximum number of CEL expressions of an object. To parse one takes 0.2 ms.
pub(super) const MAX_EXPRESSIONS: usize = 256;
/// Maximum number of bytes of a text, and of an error about one, in a message.
const MAX_SHOWN: usize = 300;
/// Maximum number of operators that a message names.
const MAX_NAMED: usize = 5;

/// Checks a CEL expression.
pub(super) fn expression(text: &str, field: &str, findings: &mut Findings) {
    if text.is_empty() {
        findings.add(Code::EmptyField, field, "is empty", "set a CEL expression");
    } else if let Err(reason) = Expression::compile(text) {
        findings.add(Code::InvalidExpression, field, shown(&reason), "correct the CEL expression");
    }
}

/// Checks the format of an access log.
pub(super) fn log_format(text: &str, field: &str, findings: &mut Findings) {
    let effect = "skysail-proxy writes no value for it";
    format(text, field, (Code::InvalidLogFormat, effect), findings);
}

/// Checks the fields of an access log in JSON.
pub(super) fn log_fields<'a>(
    fields: impl IntoIterator<Item = (&'a String, &'a Value)>,
    field: &str,
    findings: &mut Findings,
) {
    for (name, value) in fields {
        let at = skysail_yaml::join(field, name);
        match value {
            Value::String(text) => log_format(text, &at, findings),
            Value::Object(fields) => log_fields(fields, &at, findings),
            _ => {}
        }
    }
}

/// Checks the value of a header that a route adds.
pub(super) fn header_value(text: &str, field: &str, findings: &mut Findings) {
    format(text, field, (Code::InvalidFormat, "skysail-proxy refuses the route"), findings);
}

/// Checks the value of a tag of traces.
pub(super) fn tag_value(text: &str, field: &str, findings: &mut Findings) {
    format(text, field, (Code::InvalidFormat, "skysail-proxy sends no value for it"), findings);
}

/// Checks a text with command operators. `invalid` is the code for an unknown one; `effect` is that of an operator which
/// only Envoy has.
fn format(text: &str, field: &str, (invalid, effect): (Code, &str), findings: &mut Findings) {
    let pieces = match operators::parse(text) {
        Ok(pieces) => pieces,
        Err(error) => {
            let message = format!("{:?}: {error}", shown(text));
            findings.add(invalid, field, message, "write %% for a percent sign");
            return;
        }
    };
    let of = |support: OperatorSupport| {
        let found = pieces.iter().filter_map(|piece| match piece {
            Piece::Operator(operator) if operator.support() == support => Some(named(operator)),
            _ => None,
        });
        let names: BTreeSet<String> = found.take(MAX_NAMED).collect();
        (!names.is_empty()).then(|| names.into_iter().collect::<Vec<_>>().join(", "))
    };
    if let Some(names) = of(OperatorSupport::Unknown) {
        findings.add(invalid, field, format!("Envoy has no operator {names}"), "use an operator of Envoy");
    }
    if let Some(names) = of(OperatorSupport::EnvoyOnly) {
        let message = format!("only Envoy has the operator {names}; {effect}");
        findings.add(Code::UnsupportedField, field, message, "use another operator");
    }
}

/// Returns an operator as it is written, without its length.
fn named(operator: &Operator<'_>) -> String {
    let argument = operator.argument.map(|argument| format!("({})", shown(argument))).unwrap_or_default();
    format!("%{}{argument}%", shown(operator.name))
}

fn shown(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_SHOWN)]
}
