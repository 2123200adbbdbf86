//! `handle:headers()` and `handle:trailers()`.

use mlua::{Lua, Table, UserData, UserDataMethods, Value};
use skysail_http::{
    head::{self, Headers, RequestHead, Scheme},
    http1::parse,
};

use super::{
    MAX_ADDED,
    stream::{MessageKind, SharedStream, Stream, live},
};

/// Fields of the connection, which this proxy sets.
const CONNECTION: [&str; 7] =
    ["connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"];

/// The fields that an object refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Head,
    Trailers,
}

/// The fields of a head or of trailers.
pub(super) struct HeaderMap {
    stream: SharedStream,
    part: Part,
}

impl HeaderMap {
    pub(super) fn new(stream: &SharedStream, part: Part) -> Self {
        Self { stream: stream.clone(), part }
    }

    /// Returns the values of a field in lower case.
    fn values(&self, name: &str) -> mlua::Result<Vec<Vec<u8>>> {
        let stream = live(&self.stream)?;
        if self.part == Part::Head
            && let Some(value) = stream.pseudo(name)
        {
            return Ok(vec![value.into_bytes()]);
        }
        let fields = stream.fields(self.part);
        Ok(fields.map(|fields| fields.header_values(name).map(<[u8]>::to_vec).collect()).unwrap_or_default())
    }

    /// Sets or adds a field.
    fn change(&self, name: &str, value: &[u8], is_added: bool) -> mlua::Result<()> {
        let mut stream = live(&self.stream)?;
        stream.note_change(self.part);
        if self.part == Part::Head && (name.starts_with(':') || name == "host") {
            return stream.set_pseudo(name, value);
        }
        check_field(name, value)?;
        // The length follows the body.
        if name == "content-length" {
            return Ok(());
        }
        let Some(fields) = stream.fields_mut(self.part) else { return Ok(()) };
        if is_added {
            fields.append(name, value);
        } else {
            fields.remove(name);
            fields.append(name, value);
        }
        if fields.text().len() > 2 * MAX_ADDED {
            fields.remove(name);
            return Err(mlua::Error::runtime(format!("header {name} exceeds the maximum size of a head")));
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> mlua::Result<()> {
        let mut stream = live(&self.stream)?;
        stream.note_change(self.part);
        if name.starts_with(':') || name == "host" {
            return Err(mlua::Error::runtime(format!("header {name} cannot be removed")));
        }
        if !CONNECTION.contains(&name)
            && name != "content-length"
            && let Some(fields) = stream.fields_mut(self.part)
        {
            fields.remove(name);
        }
        Ok(())
    }

    /// Returns a flat list of names and values, with pseudo-header fields first.
    fn entries(&self, lua: &Lua) -> mlua::Result<Table> {
        let stream = live(&self.stream)?;
        let list = lua.create_table()?;
        if self.part == Part::Head {
            let names: &[&str] = match stream.side {
                MessageKind::Request => &[":authority", ":path", ":method", ":scheme"],
                MessageKind::Response => &[":status"],
            };
            for name in names {
                if let Some(value) = stream.pseudo(name) {
                    list.push(*name)?;
                    list.push(value)?;
                }
            }
        }
        for (name, value) in stream.fields(self.part).into_iter().flat_map(Headers::iter) {
            list.push(lua.create_string(name)?)?;
            list.push(lua.create_string(value)?)?;
        }
        Ok(list)
    }
}

impl UserData for HeaderMap {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("get", |lua, map, name: mlua::String| {
            let values = map.values(&lower(&name))?;
            if values.is_empty() { Ok(None) } else { lua.create_string(values.join(&b',')).map(Some) }
        });
        methods.add_method("getAtIndex", |lua, map, (name, index): (mlua::String, i64)| {
            let values = map.values(&lower(&name))?;
            let value = usize::try_from(index).ok().and_then(|index| values.get(index));
            value.map(|value| lua.create_string(value)).transpose()
        });
        methods.add_method("getNumValues", |_, map, name: mlua::String| Ok(map.values(&lower(&name))?.len()));
        methods.add_method("add", |lua, map, (name, value): (mlua::String, Value)| {
            map.change(&lower(&name), &text(lua, value)?, true)
        });
        methods.add_method("replace", |lua, map, (name, value): (mlua::String, Value)| {
            map.change(&lower(&name), &text(lua, value)?, false)
        });
        methods.add_method("remove", |_, map, name: mlua::String| map.remove(&lower(&name)));
        methods.add_method("setHttp1ReasonPhrase", |_, _, _: Value| -> mlua::Result<()> {
            Err(mlua::Error::runtime("skysail-proxy does not support setHttp1ReasonPhrase()"))
        });
        methods.add_method("__entries", |lua, map, ()| map.entries(lua));
    }
}

impl Stream {
    fn fields(&self, part: Part) -> Option<&Headers> {
        match (part, self.side) {
            (Part::Trailers, _) => self.trailers.as_ref(),
            (Part::Head, MessageKind::Request) => Some(self.request.headers()),
            (Part::Head, MessageKind::Response) => Some(self.response.headers()),
        }
    }

    fn fields_mut(&mut self, part: Part) -> Option<&mut Headers> {
        match (part, self.side) {
            (Part::Trailers, _) => self.trailers.as_mut(),
            (Part::Head, MessageKind::Request) => Some(&mut self.request),
            (Part::Head, MessageKind::Response) => Some(&mut self.response),
        }
    }

    fn note_change(&mut self, part: Part) {
        match part {
            Part::Head => self.has_new_head = true,
            Part::Trailers => self.has_new_trailers = true,
        }
    }

    /// Returns the value of a pseudo-header field.
    fn pseudo(&self, name: &str) -> Option<String> {
        match (self.side, name) {
            (MessageKind::Request, name) => self.request.pseudo_header(name).map(str::to_owned),
            (MessageKind::Response, ":status") => Some(self.response.status().to_string()),
            _ => None,
        }
    }

    fn set_pseudo(&mut self, name: &str, value: &[u8]) -> mlua::Result<()> {
        let is_set = match (self.side, name) {
            (MessageKind::Request, ":method") if self.request.method() == "CONNECT" => false,
            (MessageKind::Request, name) => set_pseudo(&mut self.request, name, value),
            (MessageKind::Response, ":status") => {
                let status = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                let status = status.filter(|status| (200..600).contains(status));
                status.map(|status| self.response.set_status(status)).is_some()
            }
            _ => false,
        };
        let problem = || mlua::Error::runtime(format!("header {name} cannot have this value"));
        if is_set { Ok(()) } else { Err(problem()) }
    }
}

/// Sets a pseudo-header field of a request. Returns whether its value is valid.
pub(crate) fn set_pseudo(head: &mut RequestHead, name: &str, value: &[u8]) -> bool {
    let text = std::str::from_utf8(value).unwrap_or_default();
    match name {
        ":path" if text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic()) => {
            head.set_path(text);
        }
        // A tunnel is decided before the filters.
        ":method" if !text.is_empty() && text != "CONNECT" && text.bytes().all(parse::is_token) => {
            head.set_method(text);
        }
        ":authority" | "host" => match head::as_authority(value) {
            Some(authority) => head.set_authority(authority),
            None => return false,
        },
        ":scheme" if text == "http" => head.set_scheme(Scheme::Http),
        ":scheme" if text == "https" => head.set_scheme(Scheme::Https),
        _ => return false,
    }
    true
}

/// Checks the name in lower case and the value of a field.
fn check_field(name: &str, value: &[u8]) -> mlua::Result<()> {
    if name.is_empty() || !name.bytes().all(parse::is_token) {
        return Err(mlua::Error::runtime("a header has an invalid name"));
    }
    if CONNECTION.contains(&name) {
        return Err(mlua::Error::runtime(format!("header {name} is set by the proxy")));
    }
    if !parse::is_field_value(value) || value.len() > MAX_ADDED {
        return Err(mlua::Error::runtime(format!("the value of header {name} is invalid")));
    }
    Ok(())
}

/// Returns the fields of a table: names with a string or a list of strings. Checks all but pseudo-header fields.
pub(super) fn fields(table: &Table) -> mlua::Result<Vec<(String, Vec<u8>)>> {
    let mut fields = Vec::new();
    let mut size = 0;
    let mut add = |name: &str, value: Value| {
        let value = match value {
            Value::String(value) => value.as_bytes().to_vec(),
            Value::Integer(number) => number.to_string().into_bytes(),
            Value::Number(number) => number.to_string().into_bytes(),
            other => {
                let problem = format!("header {name}: string expected, got {}", other.type_name());
                return Err(mlua::Error::runtime(problem));
            }
        };
        if !name.starts_with(':') {
            check_field(name, &value)?;
        }
        size += name.len() + value.len() + 4;
        if size > MAX_ADDED {
            return Err(mlua::Error::runtime("the headers exceed their maximum size"));
        }
        fields.push((name.to_owned(), value));
        Ok(())
    };
    for pair in table.pairs::<mlua::String, Value>() {
        let (name, value) = pair?;
        let name = lower(&name);
        match value {
            Value::Table(values) => {
                for value in values.sequence_values::<Value>() {
                    add(&name, value?)?;
                }
            }
            value => add(&name, value)?,
        }
    }
    Ok(fields)
}

fn lower(name: &mlua::String) -> String {
    name.to_string_lossy().to_ascii_lowercase()
}

/// Returns the bytes of a string or number.
fn text(lua: &Lua, value: Value) -> mlua::Result<Vec<u8>> {
    let kind = value.type_name();
    let text = lua.coerce_string(value)?;
    let text = text.ok_or_else(|| mlua::Error::runtime(format!("string expected, got {kind}")))?;
    Ok(text.as_bytes().to_vec())
}
