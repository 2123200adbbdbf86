//! Validation of texts that proxies parse: CEL expressions and texts with command operators. A proxy refuses the whole
//! listener or route of an invalid one, so the object is refused first.

use serde_json::Value;
use skysail_policy::{
    expression::Expression,
    operators::{self, OperatorSupport, Piece},
};

use super::{Code, Findings};

/// Checks a CEL expression.
pub(super) fn expression(text: &str, field: &str, findings: &mut Findings) {
    if text.is_empty() {
        findings.add(Code::EmptyField, field, "is empty", "set a CEL expression");
    } else if let Err(reason) = Expression::compile(text) {
        findings.add(Code::InvalidExpression, field, reason, "correct the CEL expression");
    }
}

/// Checks the format of an access log.
pub(super) fn log_format(text: &str, field: &str, findings: &mut Findings) {
    format(text, field, "skysail-proxy writes no value for it", findings);
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
    format(text, field, "skysail-proxy refuses the route", findings);
}

/// Checks a text with command operators. `effect` is that of an operator which only Envoy has.
fn format(text: &str, field: &str, effect: &str, findings: &mut Findings) {
    let pieces = match operators::parse(text) {
        Ok(pieces) => pieces,
        Err(error) => {
            findings.add(
                Code::InvalidFormat,
                field,
                format!("{text:?}: {error}"),
                "write %% for a percent sign",
            );
            return;
        }
    };
    for piece in pieces {
        let Piece::Operator(operator) = piece else { continue };
        let name = operator.name;
        match operator.support() {
            OperatorSupport::All => {}
            OperatorSupport::EnvoyOnly => {
                let argument = operator.argument.map(|argument| format!("({argument})")).unwrap_or_default();
                let message = format!("only Envoy supports the operator %{name}{argument}%; {effect}");
                findings.add(Code::UnsupportedField, field, message, "use another operator");
            }
            OperatorSupport::Unknown => {
                let message = format!("there is no operator %{name}%");
                findings.add(Code::InvalidFormat, field, message, "use an operator of Envoy");
            }
        }
    }
}
