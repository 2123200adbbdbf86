//! Expressions in CEL over what is known of a request or connection: Envoy's attributes.
//!
//! An expression is compiled once and knows which attributes it asks for, so that only those are put together when it is
//! evaluated. What goes wrong then, such as a header that is not there, is for the user of an expression to deal
//! with; Envoy's do not match, or say `unknown`.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt::Write as _,
    net::SocketAddr,
    sync::{Arc, LazyLock},
    thread,
    time::SystemTime,
};

use cel::{
    Env, ExecutionError, IdedExpr, Program, Value,
    common::{
        ast::{EntryExpr, Expr, LiteralValue},
        types::{CelBool, CelString},
    },
    extensions,
};
use regex::{Regex, RegexBuilder};
use serde_json::Value as Json;

use super::record::{Context, Record};
use crate::{
    config::{cluster::Workload, listener::Direction},
    error::Flags,
    head::{Headers, RequestHead},
    peer::Peer,
};

#[cfg(test)]
mod tests;

/// The attributes that are known, by the variable they are fields of.
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

/// Which bits Envoy's `response.flags` has for ours, in our order.
const FLAG_BITS: [(Flags, u8); 22] = [
    (Flags::UH, 1),
    (Flags::UT, 2),
    (Flags::LR, 3),
    (Flags::UR, 4),
    (Flags::UF, 5),
    (Flags::UC, 6),
    (Flags::UO, 7),
    (Flags::NR, 8),
    (Flags::DI, 9),
    (Flags::FI, 10),
    (Flags::RL, 11),
    (Flags::UAEX, 12),
    (Flags::DC, 14),
    (Flags::URX, 15),
    (Flags::SI, 16),
    (Flags::DPE, 18),
    (Flags::UMSDR, 19),
    (Flags::NFCF, 21),
    (Flags::DT, 22),
    (Flags::UPE, 23),
    (Flags::NC, 24),
    (Flags::OM, 25),
];

/// As long as an expression may be, in bytes, and as deep. Each level takes stack when it is read, evaluated and let go of.
const LONGEST: usize = 16 * 1024;
const DEEPEST: usize = 64;
/// What reading takes at most, however deep a text of that length is before it is refused.
const STACK: usize = 256 << 20;

/// As large as a regular expression may be when it is compiled, in bytes, and how many a worker keeps.
const LARGEST_REGEX: usize = 1 << 20;
const MOST_REGEXES: usize = 64;

/// The functions of CEL, with those for strings that Envoy can be told to have.
static FUNCTIONS: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut env = Env::stdlib();
    // There is nothing yet that they could contradict.
    let _ = env.add_extension(extensions::strings);
    let _ = cel::add_overload!(env, fn matches: (CelString<'_>, CelString<'_>) -> Result<CelBool>, id = "matches");
    let _ = cel::add_member_overload!(env, fn matches: (CelString<'_>, CelString<'_>) -> Result<CelBool>);
    Arc::new(env)
});

thread_local! {
    /// Regular expressions that were used before; `None` for those that are none.
    static REGEXES: RefCell<HashMap<String, Option<Regex>>> = RefCell::default();
}

/// Whether a regular expression is found in a text. To compile it takes a thousand times as long as to look.
fn matches(text: &CelString<'_>, pattern: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    let (text, pattern) = (text.inner(), pattern.inner());
    let found = REGEXES.with_borrow_mut(|known| {
        if !known.contains_key(pattern) {
            if known.len() >= MOST_REGEXES {
                known.clear();
            }
            let compiled = RegexBuilder::new(pattern).size_limit(LARGEST_REGEX).build().ok();
            known.insert(pattern.to_owned(), compiled);
        }
        known.get(pattern).and_then(|regex| Some(regex.as_ref()?.is_match(text)))
    });
    found.map(CelBool::from).ok_or_else(|| ExecutionError::FunctionError {
        function: "matches".to_owned(),
        message: format!("{pattern:?} is no regular expression, or too large a one"),
    })
}

/// A compiled expression.
#[derive(Debug)]
pub struct Expression {
    program: Program,
    uses: Uses,
}

/// What an expression asks for.
#[derive(Debug, Default)]
struct Uses {
    /// Variables with the fields that are asked for.
    attributes: Vec<(&'static str, Vec<Asked>)>,
    /// What nobody knows.
    unknown: Vec<String>,
    /// How deep it is.
    depth: usize,
}

/// A field that an expression asks for.
#[derive(Debug)]
struct Asked {
    field: &'static str,
    /// What of it is asked for by name.
    keys: Vec<String>,
    /// All of it is asked for, too.
    all: bool,
}

impl Expression {
    /// Compiles an expression.
    ///
    /// # Errors
    /// Where it is wrong.
    pub fn compile(text: &str) -> Result<Self, String> {
        if text.len() > LONGEST {
            return Err(format!("is longer than {LONGEST} bytes"));
        }
        let read = thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || Self::read(text));
            thread.map(thread::ScopedJoinHandle::join)
        });
        match read {
            Ok(Ok(read)) => read,
            Ok(Err(_)) => Err(format!("{text:?} cannot be read")),
            Err(error) => Err(format!("there is no thread to read it: {error}")),
        }
    }

    fn read(text: &str) -> Result<Self, String> {
        let program = FUNCTIONS.compile(text).map_err(|errors| {
            let mut said = format!("{text:?} is no expression of CEL");
            for error in &errors.errors {
                let _ = write!(said, "; line {}, column {}: {}", error.pos.0, error.pos.1, error.msg);
            }
            said
        })?;
        let mut uses = Uses::default();
        uses.look(program.expression(), &mut Vec::new(), 0);
        if uses.depth > DEEPEST {
            return Err(format!("{text:?} is deeper than {DEEPEST} levels"));
        }
        uses.unknown.extend(
            program.references().functions().into_iter().filter(|name| !is_function(name)).map(str::to_owned),
        );
        uses.unknown.sort();
        Ok(Self { program, uses })
    }

    /// Attributes, variables and functions in it that are not known: it fails where they are asked for.
    pub fn unknown(&self) -> &[String] {
        &self.uses.unknown
    }

    /// Whether it is true.
    pub(super) fn holds(&self, context: &Context<'_>) -> bool {
        matches!(self.evaluate(context), Ok(Value::Bool(true)))
    }

    /// Its value as a text; `None` where it has none.
    pub(super) fn text(&self, context: &Context<'_>) -> Option<String> {
        Some(match self.evaluate(context).ok()? {
            Value::String(text) => text.as_str().to_owned(),
            Value::Int(number) => number.to_string(),
            Value::UInt(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            _ => return None,
        })
    }

    fn evaluate(&self, context: &Context<'_>) -> Result<Value, ExecutionError> {
        let mut variables = cel::Context::with_env(Arc::clone(&FUNCTIONS));
        for (root, fields) in &self.uses.attributes {
            let there =
                fields.iter().filter_map(|asked| Some((asked.field, attribute(root, asked, context)?)));
            variables.add_variable_from_value(*root, there.collect::<HashMap<_, _>>());
        }
        self.program.execute(&variables)
    }
}

/// Whether there is such a function or operator; called the wrong way, it says something else than that it is not there.
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
    /// Takes down what an expression asks for. `bound` are the variables of its own, `depth` is how deep it stands.
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

    /// A field of an expression.
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
        match (fields.iter_mut().find(|asked| asked.field == field), key) {
            (Some(asked), Some(key)) => asked.keys.push(key.to_owned()),
            (Some(asked), None) => asked.all = true,
            (None, key) => {
                let keys = key.map(str::to_owned).into_iter().collect();
                fields.push(Asked { field, keys, all: key.is_none() });
            }
        }
    }
}

/// The value of an attribute, if there is one.
fn attribute(root: &str, asked: &Asked, context: &Context<'_>) -> Option<Value> {
    let (record, field) = (context.record, asked.field);
    match root {
        "request" => request(context.request?, asked, record),
        "response" => response(asked, context),
        "connection" => match field {
            "mtls" => Some(Value::Bool(record.downstream.is_some_and(|peer| peer.certificate.is_some()))),
            "requested_server_name" => Some(record.server_name.unwrap_or_default().into()),
            "termination_details" => some(record.termination),
            _ => certificate(record.downstream?, field),
        },
        "upstream" => match field {
            "address" => Some(record.upstream_address()?.to_string().into()),
            "port" => Some(port(record.upstream_address()?)),
            "local_address" => Some(record.upstream_local?.to_string().into()),
            "transport_failure_reason" => record.upstream_address().map(|_| record.upstream_failure.into()),
            "request_attempt_count" => Some(Value::Int(record.attempts.into())),
            _ => certificate(record.upstream?, field),
        },
        "source" | "destination" => {
            let address = if root == "source" { record.downstream_remote } else { record.downstream_local };
            Some(if field == "port" { port(address?) } else { address?.to_string().into() })
        }
        "metadata" => {
            let found = record.metadata.into_iter().flatten();
            Some(found.map(|(filter, found)| (filter.clone(), json(found))).collect::<HashMap<_, _>>().into())
        }
        "filter_state" => match field {
            "downstream_peer" => Some(workload(&*record.downstream?.workload()?)),
            _ => {
                let peer = record.upstream.and_then(Peer::workload);
                Some(workload(&*peer.or_else(|| record.endpoint?.workload.clone())?))
            }
        },
        _ => match field {
            "cluster_name" => Some((*record.cluster?.name).into()),
            "route_name" => some(record.route_name),
            _ => Some(Value::Int(match record.direction {
                Direction::Unspecified => 0,
                Direction::Inbound => 1,
                Direction::Outbound => 2,
            })),
        },
    }
}

fn request(head: &RequestHead, asked: &Asked, record: &Record<'_>) -> Option<Value> {
    let header = |name| head.header(name).map(|value| String::from_utf8_lossy(value).as_ref().into());
    Some(match asked.field {
        "path" => head.path().into(),
        "url_path" => head.path_without_query().into(),
        "host" => head.authority().into(),
        "scheme" => head.scheme().into(),
        "method" => head.method().into(),
        "headers" => {
            let mut found = headers(head.headers(), asked);
            for name in APART {
                let keys = asked.keys.iter().filter(|key| key.eq_ignore_ascii_case(name)).map(String::as_str);
                for key in keys.chain(asked.all.then_some(name)) {
                    found.extend(head.apart(name).map(|value| (key.to_owned(), value.to_owned())));
                }
            }
            found.into()
        }
        "referer" => header("referer")?,
        "useragent" => header("user-agent")?,
        "id" => header("x-request-id")?,
        "protocol" => head.version.as_str().into(),
        "query" => head.query().unwrap_or_default().into(),
        "time" => {
            let since = record.start.duration_since(SystemTime::UNIX_EPOCH).ok()?;
            let seconds = i64::try_from(since.as_secs()).ok()?;
            Value::Timestamp(chrono::DateTime::from_timestamp(seconds, since.subsec_nanos())?.fixed_offset())
        }
        "duration" => Value::Duration(chrono::Duration::from_std(record.duration).ok()?),
        "size" => number(record.bytes_received),
        _ => {
            let apart = APART.iter().filter_map(|name| Some(name.len() + head.apart(name)?.len()));
            number(record.bytes_received + (apart.sum::<usize>() + size(head.headers())) as u64)
        }
    })
}

/// Headers of HTTP/2 that are kept apart from the others.
const APART: [&str; 4] = [":method", ":path", ":authority", ":scheme"];

fn response(asked: &Asked, context: &Context<'_>) -> Option<Value> {
    let record = context.record;
    let head = || Some(context.response?.headers());
    Some(match asked.field {
        "code" if record.status == 0 => return None,
        "code" => Value::Int(record.status.into()),
        "code_details" => return some(record.details),
        "flags" => {
            let set = FLAG_BITS.iter().filter(|(flag, _)| record.flags.contains(*flag));
            Value::Int(set.map(|(_, bit)| 1 << bit).sum())
        }
        "grpc_status" => {
            let stands_for = || (record.status != 0).then(|| crate::error::grpc_status(record.status));
            Value::Int(record.grpc_status.or_else(stands_for)?.into())
        }
        "headers" => headers(head()?, asked).into(),
        "size" => number(record.bytes_sent),
        _ => number(record.bytes_sent + size(head()?) as u64),
    })
}

fn certificate(peer: &Peer, field: &str) -> Option<Value> {
    let names = peer.names();
    Some(match field {
        "uri_san_local_certificate" => (**peer.local_principal.as_ref()?).into(),
        "subject_peer_certificate" => names?.subject.as_str().into(),
        "dns_san_peer_certificate" => names?.dns.first()?.as_str().into(),
        "uri_san_peer_certificate" => names?.uris.first()?.as_str().into(),
        _ => (*peer.certificate.as_ref()?.fingerprint).into(),
    })
}

fn workload(of: &Workload) -> Value {
    let fields = [
        ("workload", &of.name),
        ("namespace", &of.namespace),
        ("cluster", &of.cluster),
        ("service", &of.canonical_name),
        ("revision", &of.canonical_revision),
        ("app", &of.app),
        ("version", &of.version),
    ];
    fields.map(|(name, value)| (name, Value::from(&**value))).into_iter().collect::<HashMap<_, _>>().into()
}

/// Those that are asked for by name, for which case does not count, under that name; all under their own.
fn headers(of: &Headers, asked: &Asked) -> HashMap<String, String> {
    let own = of.iter().map(|(name, _)| String::from_utf8_lossy(name).into_owned()).filter(|_| asked.all);
    let value = |name: &str| {
        let values: Vec<_> = of.header_values(name).collect();
        (!values.is_empty()).then(|| String::from_utf8_lossy(&values.join(&b","[..])).into_owned())
    };
    let names = own.chain(asked.keys.iter().cloned());
    names.filter_map(|name| value(&name.to_ascii_lowercase()).map(|value| (name, value))).collect()
}

fn size(of: &Headers) -> usize {
    of.iter().map(|(name, value)| name.len() + value.len()).sum()
}

/// A text that is empty where there is none.
fn some(text: &str) -> Option<Value> {
    (!text.is_empty()).then(|| text.into())
}

fn port(of: SocketAddr) -> Value {
    Value::Int(of.port().into())
}

fn number(of: u64) -> Value {
    Value::Int(i64::try_from(of).unwrap_or(i64::MAX))
}

fn json(value: &Json) -> Value {
    match value {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        // As in a `google.protobuf.Struct`.
        Json::Number(number) => Value::Float(number.as_f64().unwrap_or_default()),
        Json::String(text) => text.as_str().into(),
        Json::Array(list) => list.iter().map(json).collect::<Vec<_>>().into(),
        Json::Object(map) => {
            map.iter().map(|(key, value)| (key.clone(), json(value))).collect::<HashMap<_, _>>().into()
        }
    }
}
