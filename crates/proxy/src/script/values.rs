//! Conversion between JSON and Lua values, and objects with fields.

use std::sync::Arc;

use mlua::{IntoLua as _, Lua, UserDataMethods, Value};
use serde_json::{Map, Value as Json};

/// Maximum depth of a table that a script stores.
const MAX_DEPTH: usize = 16;

/// Returns the Lua value of a JSON value.
pub(super) fn to_lua(lua: &Lua, json: &Json) -> mlua::Result<Value> {
    Ok(match json {
        Json::Null => Value::Nil,
        Json::Bool(flag) => Value::Boolean(*flag),
        Json::Number(number) => Value::Number(number.as_f64().unwrap_or_default()),
        Json::String(text) => Value::String(lua.create_string(text)?),
        Json::Array(items) => {
            let table = lua.create_table_with_capacity(items.len(), 0)?;
            for item in items {
                table.push(to_lua(lua, item)?)?;
            }
            Value::Table(table)
        }
        Json::Object(fields) => Value::Table(to_table(lua, fields)?),
    })
}

/// Returns the Lua table of a JSON object.
pub(super) fn to_table(lua: &Lua, fields: &Map<String, Json>) -> mlua::Result<mlua::Table> {
    let table = lua.create_table()?;
    for (key, value) in fields {
        table.raw_set(key.as_str(), to_lua(lua, value)?)?;
    }
    Ok(table)
}

/// Returns the JSON value of a Lua value, and subtracts its size from `room`.
///
/// # Errors
///
/// The value has no JSON form, is nested too deeply, or exceeds `room` bytes.
pub(super) fn to_json(value: &Value, room: &mut usize, depth: usize) -> mlua::Result<Json> {
    let mut spend = |size: usize| match room.checked_sub(size) {
        Some(left) => {
            *room = left;
            Ok(())
        }
        None => Err(mlua::Error::runtime("dynamic metadata exceed their limit of 64 KiB in one run")),
    };
    spend(16)?;
    if depth > MAX_DEPTH {
        return Err(mlua::Error::runtime(format!("a value is nested more than {MAX_DEPTH} times")));
    }
    Ok(match value {
        Value::Nil => Json::Null,
        Value::Boolean(flag) => Json::Bool(*flag),
        Value::Integer(number) => (*number as f64).into(),
        Value::Number(number) => (*number).into(),
        Value::String(text) => {
            spend(text.as_bytes().len())?;
            Json::String(text.to_string_lossy())
        }
        // As in Envoy, a table with a length is a list.
        Value::Table(table) if table.raw_len() > 0 => {
            let items = table.sequence_values::<Value>();
            Json::Array(items.map(|item| to_json(&item?, room, depth + 1)).collect::<mlua::Result<_>>()?)
        }
        Value::Table(table) => {
            let mut fields = Map::new();
            for pair in table.pairs::<Value, Value>() {
                let (key, value) = pair?;
                let Value::String(key) = key else {
                    return Err(mlua::Error::runtime(format!("unexpected key type {}", key.type_name())));
                };
                let text = to_json(&Value::String(key), room, depth + 1)?;
                let text = text.as_str().unwrap_or_default().to_owned();
                fields.insert(text, to_json(&value, room, depth + 1)?);
            }
            Json::Object(fields)
        }
        other => return Err(mlua::Error::runtime(format!("unexpected value type {}", other.type_name()))),
    })
}

/// Returns a flat list of keys and values, for `pairs`.
pub(super) fn entries(lua: &Lua, fields: &Map<String, Json>) -> mlua::Result<mlua::Table> {
    let list = lua.create_table()?;
    for (key, value) in fields {
        list.push(key.as_str())?;
        // A null would end the list.
        let value = to_lua(lua, value)?;
        list.push(if value.is_nil() { false.into_lua(lua)? } else { value })?;
    }
    Ok(list)
}

/// An object with the fields of a JSON object.
pub(super) struct Fields(pub(super) Arc<Map<String, Json>>);

impl mlua::UserData for Fields {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("get", |lua, Self(fields), key: String| {
            fields.get(&key).map_or(Ok(Value::Nil), |value| to_lua(lua, value))
        });
        methods.add_method("__entries", |lua, Self(fields), ()| entries(lua, fields));
        // `filterContext()["key"]`.
        methods.add_meta_method(mlua::MetaMethod::Index, |lua, Self(fields), key: String| {
            fields.get(&key).map_or(Ok(Value::Nil), |value| to_lua(lua, value))
        });
    }
}
