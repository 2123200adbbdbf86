//! CEL expressions over Envoy's attributes of a request or connection.
//!
//! An expression is compiled once and records the attributes that it reads, so that an evaluation needs only those.
//! The caller supplies their values and decides the effect of a failed evaluation, for example that a filter does not
//! match.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt::Write as _,
    sync::{Arc, LazyLock},
    thread,
};

use cel::{
    Env, ExecutionError, IdedExpr, Program, Value,
    common::{
        ast::{EntryExpr, Expr, LiteralValue},
        types::{CelBool, CelString},
    },
    extensions,
};
use regex::bytes::Regex;
use skysail_core::re2;

/// Known attributes, by the variable that they are fields of.
const KNOWN: [(&str, &[&str]); 9] = [
    (
        "request",
        &[
            "path",
            "url_path",
            "host",
            "scheme",
            "method",
            "headers",
            "referer",
            "useragent",
            "time",
            "id",
            "protocol",
            "query",
            "duration",
            "size",
            "total_size",
        ],
    ),
    ("response", &["code", "code_details", "flags", "grpc_status", "headers", "size", "total_size"]),
    (
        "connection",
        &[
            "mtls",
            "requested_server_name",
            "subject_peer_certificate",
            "dns_san_peer_certificate",
            "uri_san_peer_certificate",
            "uri_san_local_certificate",
            "sha256_peer_certificate_digest",
            "termination_details",
        ],
    ),
    (
        "upstream",
        &[
            "address",
            "port",
            "local_address",
            "subject_peer_certificate",
            "dns_san_peer_certificate",
            "uri_san_peer_certificate",
            "uri_san_local_certificate",
            "sha256_peer_certificate_digest",
            "transport_failure_reason",
            "request_attempt_count",
        ],
    ),
    ("source", &["address", "port"]),
    ("destination", &["address", "port"]),
    ("metadata", &["filter_metadata"]),
    ("filter_state", &["downstream_peer", "upstream_peer"]),
    ("xds", &["cluster_name", "route_name", "listener_direction"]),
];

/// Maximum length of an expression in bytes, and its maximum depth. Each level uses stack when it is parsed, evaluated
/// and dropped.
const MAX_LENGTH: usize = 16 * 1024;
const DEEPEST: usize = 64;
/// Size of the stack for parsing, in bytes. The depth is checked after parsing, so a text of maximum length may be
/// deeper than [`DEEPEST`] until then.
const STACK: usize = 256 << 20;

/// Maximum number of compiled regular expressions that a worker caches.
const MAX_REGEXES: usize = 64;

/// The functions of CEL, and the string functions that Envoy can enable.
static FUNCTIONS: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut env = Env::stdlib();
    // The standard library has none of these functions (`matches` needs a feature that is off), so none conflicts.
    let _ = env.add_extension(extensions::strings);
    let _ = cel::add_overload!(env, fn matches: (CelString<'_>, CelString<'_>) -> Result<CelBool>, id = "matches");
    let _ = cel::add_member_overload!(env, fn matches: (CelString<'_>, CelString<'_>) -> Result<CelBool>);
    Arc::new(env)
});

thread_local! {
    /// Compiled regular expressions; `None` for invalid ones.
    static REGEXES: RefCell<HashMap<String, Option<Regex>>> = RefCell::default();
}

/// Returns whether a regular expression matches a part of a text. Compiled expressions are cached, because compiling
/// takes a thousand times as long as matching.
fn matches(text: &CelString<'_>, pattern: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    let (text, pattern) = (text.inner(), pattern.inner());
    let found = REGEXES.with_borrow_mut(|known| {
        if !known.contains_key(pattern) {
            if known.len() >= MAX_REGEXES {
                known.clear();
            }
            let compiled = re2::compile(pattern).ok();
            known.insert(pattern.to_owned(), compiled);
        }
        known.get(pattern).and_then(|regex| Some(regex.as_ref()?.is_match(text.as_bytes())))
    });
    found.map(CelBool::from).ok_or_else(|| ExecutionError::FunctionError {
        function: "matches".to_owned(),
        message: format!("{pattern:?} is not a valid regular expression, or exceeds the size limit"),
    })
}

/// A compiled expression.
#[derive(Debug)]
pub struct Expression {
    program: Program,
    uses: Uses,
}

/// Attributes and functions that an expression uses.
#[derive(Debug, Default)]
struct Uses {
    /// Variables with the fields that are read.
    attributes: Vec<(&'static str, Vec<AttributeUse>)>,
    /// Unknown attributes, variables and functions.
    unknown: Vec<String>,
    /// Depth of the expression.
    depth: usize,
}

/// A field of an attribute that an expression reads.
#[derive(Debug)]
pub struct AttributeUse {
    /// Name of the field.
    pub field: &'static str,
    /// Keys of the field that the expression reads by name, for example names of headers.
    pub keys: Vec<String>,
    /// The expression reads the field as a whole.
    pub all: bool,
}

impl Expression {
    /// Compiles an expression.
    ///
    /// # Errors
    /// The text is not a CEL expression, is too long or is too deep, or no thread can be started to parse it.
    pub fn compile(text: &str) -> Result<Self, String> {
        if text.len() > MAX_LENGTH {
            return Err(format!("is longer than {MAX_LENGTH} bytes"));
        }
        let read = thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || Self::read(text));
            thread.map(thread::ScopedJoinHandle::join)
        });
        match read {
            Ok(Ok(read)) => read,
            Ok(Err(_)) => Err(format!("{text:?} cannot be parsed")),
            Err(error) => Err(format!("cannot start a thread to parse the expression: {error}")),
        }
    }

    fn read(text: &str) -> Result<Self, String> {
        let program = FUNCTIONS.compile(text).map_err(|errors| {
            let mut message = format!("{text:?} is not a valid CEL expression");
            for error in &errors.errors {
                let _ = write!(message, "; line {}, column {}: {}", error.pos.0, error.pos.1, error.msg);
            }
            message
        })?;
        let mut uses = Uses::default();
        uses.look(program.expression(), &mut Vec::new(), 0);
        if uses.depth > DEEPEST {
            return Err(format!("{text:?} is nested deeper than {DEEPEST} levels"));
        }
        uses.unknown.extend(
            program.references().functions().into_iter().filter(|name| !is_function(name)).map(str::to_owned),
        );
        uses.unknown.sort();
        Ok(Self { program, uses })
    }

    /// Returns unknown attributes, variables and functions. An evaluation that reaches one of them fails.
    pub fn unknown(&self) -> &[String] {
        &self.uses.unknown
    }

    /// Returns whether the value is `true`. `attribute` returns the value of an attribute by its variable and field.
    pub fn holds(&self, attribute: impl Fn(&str, &AttributeUse) -> Option<Value>) -> bool {
        matches!(self.evaluate(attribute), Ok(Value::Bool(true)))
    }

    /// Returns the value as text, or `None` if the evaluation fails or the value is not a string, a number, a boolean
    /// or bytes.
    pub fn text(&self, attribute: impl Fn(&str, &AttributeUse) -> Option<Value>) -> Option<String> {
        Some(match self.evaluate(attribute).ok()? {
            Value::String(text) => text.as_str().to_owned(),
            Value::Int(number) => number.to_string(),
            Value::UInt(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            _ => return None,
        })
    }

    /// Returns the value as JSON, or `None` if the evaluation fails or the value has no JSON form. As in Envoy, numbers
    /// are floating-point numbers.
    pub fn json(
        &self,
        attribute: impl Fn(&str, &AttributeUse) -> Option<Value>,
    ) -> Option<serde_json::Value> {
        json(self.evaluate(attribute).ok()?, 0)
    }

    /// Returns the attributes that the expression reads: variables with their fields.
    pub fn attributes(&self) -> impl Iterator<Item = (&'static str, &[AttributeUse])> {
        self.uses.attributes.iter().map(|(root, fields)| (*root, fields.as_slice()))
    }

    fn evaluate(
        &self,
        attribute: impl Fn(&str, &AttributeUse) -> Option<Value>,
    ) -> Result<Value, ExecutionError> {
        let mut variables = cel::Context::with_env(Arc::clone(&FUNCTIONS));
        for (root, fields) in self.attributes() {
            let there = fields
                .iter()
                .filter_map(|attribute_use| Some((attribute_use.field, attribute(root, attribute_use)?)));
            variables.add_variable_from_value(root, there.collect::<HashMap<_, _>>());
        }
        self.program.execute(&variables)
    }
}

/// Returns a value as JSON; `None` for values without a JSON form, such as durations, and for those nested too deep.
fn json(value: Value, depth: usize) -> Option<serde_json::Value> {
    if depth > DEEPEST {
        return None;
    }
    Some(match value {
        Value::String(text) => text.as_str().into(),
        Value::Int(number) => (number as f64).into(),
        Value::UInt(number) => (number as f64).into(),
        Value::Float(number) => number.into(),
        Value::Bool(value) => value.into(),
        Value::Bytes(bytes) => String::from_utf8_lossy(&bytes).into(),
        Value::List(list) => {
            list.iter().map(|item| json(item.clone(), depth + 1)).collect::<Option<Vec<_>>>()?.into()
        }
        Value::Map(map) => {
            let entries =
                map.map.iter().map(|(key, value)| Some((key.to_string(), json(value.clone(), depth + 1)?)));
            entries.collect::<Option<serde_json::Map<_, _>>>()?.into()
        }
        Value::Timestamp(time) => time.to_rfc3339().into(),
        Value::Null => serde_json::Value::Null,
        _ => return None,
    })
}

/// Returns whether a function or operator exists. A call of an existing one with wrong arguments fails with another
/// error.
fn is_function(name: &str) -> bool {
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return true;
    }
    let context = cel::Context::with_env(Arc::clone(&FUNCTIONS));
    [format!("{name}()"), format!("''.{name}()")].iter().any(|call| {
        let called = FUNCTIONS.compile(call).map(|program| program.execute(&context));
        !matches!(called, Ok(Err(ExecutionError::UndeclaredReference(_))))
    })
}

impl Uses {
    /// Records the attributes and functions that an expression uses. `bound` are the variables of the comprehensions
    /// around it, `depth` is its depth.
    fn look(&mut self, expression: &IdedExpr, bound: &mut Vec<String>, depth: usize) {
        self.depth = self.depth.max(depth);
        let below = depth + 1;
        match &expression.expr {
            Expr::Unspecified | Expr::Literal(_) => {}
            Expr::Ident(name) if bound.contains(name) => {}
            Expr::Ident(name) => match KNOWN.iter().find(|(root, _)| root == name) {
                Some((root, fields)) => fields.iter().for_each(|field| self.add(root, field, None)),
                None => self.unknown.push(name.clone()),
            },
            Expr::Select(select) => self.field(&select.operand, &select.field, bound, below),
            Expr::Call(call) => {
                if call.func_name == "_[_]"
                    && let [of, key] = call.args.as_slice()
                    && let Expr::Literal(LiteralValue::String(field)) = &key.expr
                {
                    return self.field(of, field.inner(), bound, below);
                }
                if call.func_name == "@in"
                    && let [key, of] = call.args.as_slice()
                    && let Expr::Literal(LiteralValue::String(field)) = &key.expr
                    && let Expr::Select(_) = &of.expr
                {
                    return self.field(of, field.inner(), bound, below);
                }
                for inner in call.target.as_deref().into_iter().chain(&call.args) {
                    self.look(inner, bound, below);
                }
            }
            Expr::List(list) => list.elements.iter().for_each(|inner| self.look(inner, bound, below)),
            Expr::Map(map) => map.entries.iter().for_each(|entry| self.entry(&entry.expr, bound, below)),
            Expr::Struct(of) => of.entries.iter().for_each(|entry| self.entry(&entry.expr, bound, below)),
            Expr::Comprehension(of) => {
                self.look(&of.iter_range, bound, below);
                self.look(&of.accu_init, bound, below);
                let before = bound.len();
                bound.extend([of.iter_var.clone(), of.accu_var.clone()]);
                bound.extend(of.iter_var2.clone());
                for inner in [&of.loop_cond, &of.loop_step, &of.result] {
                    self.look(inner, bound, below);
                }
                bound.truncate(before);
            }
        }
    }

    fn entry(&mut self, entry: &EntryExpr, bound: &mut Vec<String>, depth: usize) {
        match entry {
            EntryExpr::StructField(field) => self.look(&field.value, bound, depth),
            EntryExpr::MapEntry(entry) => {
                self.look(&entry.key, bound, depth);
                self.look(&entry.value, bound, depth);
            }
        }
    }

    /// Records a field of an expression.
    fn field(&mut self, of: &IdedExpr, field: &str, bound: &mut Vec<String>, depth: usize) {
        let (name, field, key) = match &of.expr {
            Expr::Ident(name) => (name, field, None),
            Expr::Select(select) if let Expr::Ident(name) = &select.operand.expr => {
                (name, select.field.as_str(), Some(field))
            }
            _ => return self.look(of, bound, depth),
        };
        let known = KNOWN.iter().find(|(root, _)| root == name && !bound.contains(name));
        let Some((root, fields)) = known else { return self.look(of, bound, depth) };
        match fields.iter().find(|known| **known == field) {
            Some(known) => self.add(root, known, key),
            None => self.unknown.push(format!("{name}.{field}")),
        }
    }

    fn add(&mut self, root: &'static str, field: &'static str, key: Option<&str>) {
        let at = self.attributes.iter().position(|(known, _)| *known == root).unwrap_or_else(|| {
            self.attributes.push((root, Vec::new()));
            self.attributes.len() - 1
        });
        let Some((_, fields)) = self.attributes.get_mut(at) else { return };
        match (fields.iter_mut().find(|attribute_use| attribute_use.field == field), key) {
            (Some(attribute_use), Some(key)) => attribute_use.keys.push(key.to_owned()),
            (Some(attribute_use), None) => attribute_use.all = true,
            (None, key) => {
                let keys = key.map(str::to_owned).into_iter().collect();
                fields.push(AttributeUse { field, keys, all: key.is_none() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(text: &str) -> bool {
        Expression::compile(text).unwrap().holds(|_, _| None)
    }

    #[test]
    fn regular_expressions_are_cached() {
        assert!(holds("'/api/v1'.matches('^/api/v[0-9]+$') && matches('ab', 'b')"));
        assert!(!holds("'/api'.matches('^/api/v[0-9]+$')"));
        // One is invalid, the other too large.
        assert!(!holds("'a'.matches('(')") && !holds("!'a'.matches('(a{1000}){1000}')"));
        REGEXES.with_borrow(|known| assert!(known["^/api/v[0-9]+$"].is_some() && known["("].is_none()));
        for number in 0..2 * MAX_REGEXES {
            assert!(holds(&format!("'{number}'.matches('^{number}$')")));
        }
        REGEXES.with_borrow(|known| assert!(known.len() <= MAX_REGEXES));
    }
}
