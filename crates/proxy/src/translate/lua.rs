//! Translates the Lua filter and the settings of routes for it. Compiles each script.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use serde_json::{Map, Value};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{DataSource, Metadata},
        extensions::filters::http::lua::v3::{Lua as LuaProto, LuaPerRoute, lua_per_route::Override},
    },
    google::protobuf::{Struct, Value as ValueProto, value::Kind},
};

use super::{At as _, Reject, Result, flag, tls_context};
use crate::script;
use skysail_policy::config::{
    lua::{Lua, LuaChoice, LuaRoute, LuaScript},
    route::Setting,
};

/// Maximum depth of a value in metadata.
const MAX_DEPTH: usize = 64;
/// Maximum number of different scripts of all resources, those that an update replaces included. The control plane
/// sends a quarter of it at most.
const MAX_SCRIPTS: usize = 256;
/// Maximum size in bytes of the different scripts of all resources.
const MAX_SIZE: usize = 4 << 20;
/// Namespace of metadata that the control plane adds to each route. Scripts have no use for it.
const ISTIO: &str = "istio";

/// Translates the filter.
#[expect(deprecated, reason = "configurations still set `inline_code`")]
pub(super) fn translate(proto: &LuaProto) -> Result<Lua> {
    let default = match (&proto.default_source_code, proto.inline_code.as_str()) {
        (Some(_), code) if !code.is_empty() => {
            return Err(Reject::new("excludes default_source_code").at_field("inline_code"));
        }
        (Some(source), _) => Some(load(source).at("default_source_code")?),
        (None, "") => None,
        (None, code) => Some(compile(code).at("inline_code")?),
    };
    let named = |(name, source): (&String, &DataSource)| {
        let script = load(source).at(format_args!("source_codes[{name:?}]"))?;
        Ok((name.as_str().into(), script))
    };
    Ok(Lua {
        default,
        named: proto.source_codes.iter().map(named).collect::<Result<_>>()?,
        clear_route: flag(proto.clear_route_cache).unwrap_or(true),
        context: context(proto.filter_context.as_ref())?.unwrap_or_default(),
    })
}

/// Translates the settings of a route.
pub(super) fn setting(proto: &LuaPerRoute) -> Result<Setting> {
    let script = match &proto.r#override {
        Some(Override::Disabled(true)) => return Ok(Setting::Off),
        Some(Override::Disabled(false)) => return Err(Reject::new("must be true").at_field("disabled")),
        Some(Override::Name(name)) => LuaChoice::Named(name.as_str().into()),
        Some(Override::SourceCode(source)) => LuaChoice::Own(load(source).at("source_code")?),
        None => LuaChoice::Default,
    };
    Ok(Setting::Lua(Arc::new(LuaRoute { script, context: context(proto.filter_context.as_ref())? })))
}

/// Translates the metadata of a route; `None` if a script could not use it.
pub(super) fn metadata(proto: Option<&Metadata>) -> Result<Option<Box<Map<String, Value>>>> {
    let entries = proto.iter().flat_map(|proto| &proto.filter_metadata);
    let mut metadata = Map::new();
    for (name, values) in entries.filter(|(name, _)| *name != ISTIO) {
        metadata
            .insert(name.clone(), fields(&values.fields, 0).at(format_args!("metadata[{name:?}]"))?.into());
    }
    Ok((!metadata.is_empty()).then(|| Box::new(metadata)))
}

fn context(proto: Option<&Struct>) -> Result<Option<Arc<Map<String, Value>>>> {
    let context = proto.map(|proto| fields(&proto.fields, 0).at("filter_context"));
    Ok(context.transpose()?.map(Arc::new))
}

fn load(source: &DataSource) -> Result<Arc<LuaScript>> {
    let code = tls_context::read(source)?;
    compile(&String::from_utf8(code).map_err(|_| Reject::new("is not UTF-8"))?)
}

/// Returns the script with this code. Filters with equal code share it.
fn compile(code: &str) -> Result<Arc<LuaScript>> {
    static SCRIPTS: Mutex<Vec<Weak<LuaScript>>> = Mutex::new(Vec::new());
    let mut scripts = SCRIPTS.lock().unwrap_or_else(PoisonError::into_inner);
    share(&mut scripts, code)
}

fn share(scripts: &mut Vec<Weak<LuaScript>>, code: &str) -> Result<Arc<LuaScript>> {
    scripts.retain(|script| script.strong_count() > 0);
    let used: Vec<Arc<LuaScript>> = scripts.iter().filter_map(Weak::upgrade).collect();
    if let Some(script) = used.iter().find(|script| *script.source == *code) {
        return Ok(Arc::clone(script));
    }
    let size = used.iter().map(|script| script.source.len()).sum::<usize>() + code.len();
    if used.len() >= MAX_SCRIPTS || size > MAX_SIZE {
        let limits = format!("more than {MAX_SCRIPTS} different scripts, or {MAX_SIZE} bytes");
        return Err(Reject::new(format!("the scripts of the proxy are {limits}: remove or combine scripts")));
    }
    let script =
        script::check(code).map_err(|problem| Reject::new(format!("script load error: {problem}")))?;
    let script = Arc::new(script);
    scripts.push(Arc::downgrade(&script));
    Ok(script)
}

fn fields(proto: &HashMap<String, ValueProto>, depth: usize) -> Result<Map<String, Value>> {
    if depth > MAX_DEPTH {
        return Err(Reject::new(format!("is nested more than {MAX_DEPTH} times")));
    }
    proto.iter().map(|(key, value)| Ok((key.clone(), json(value, depth + 1)?))).collect()
}

fn json(proto: &ValueProto, depth: usize) -> Result<Value> {
    Ok(match &proto.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::NumberValue(number)) => (*number).into(),
        Some(Kind::StringValue(text)) => text.as_str().into(),
        Some(Kind::BoolValue(flag)) => (*flag).into(),
        Some(Kind::StructValue(inner)) => fields(&inner.fields, depth)?.into(),
        Some(Kind::ListValue(_)) if depth > MAX_DEPTH => {
            return Err(Reject::new(format!("is nested more than {MAX_DEPTH} times")));
        }
        Some(Kind::ListValue(list)) => {
            list.values.iter().map(|value| json(value, depth + 1)).collect::<Result<Vec<_>>>()?.into()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scripts_are_shared_and_different_ones_are_limited() {
        let mut scripts = Vec::new();
        let mut load = |code: &str| share(&mut scripts, code);
        let first = load("x = 0").unwrap();
        assert!(Arc::ptr_eq(&first, &load("x = 0").unwrap()));
        let long = |name: usize| format!("x = {name} -- {}", "-".repeat(MAX_SIZE / 4));
        let held: Vec<_> = (0..3).map(|name| load(&long(name)).unwrap()).collect();
        assert!(load(&long(3)).unwrap_err().to_string().contains("remove or combine scripts"));
        assert!(load(&long(1)).is_ok(), "a script that is in use");
        drop(held);
        let held: Vec<_> = (1..MAX_SCRIPTS).map(|name| load(&format!("x = {name}")).unwrap()).collect();
        assert!(load("x = -1").is_err());
        drop(held);
        assert!(load("x = -1").is_ok(), "scripts that are not in use do not count");
    }
}
