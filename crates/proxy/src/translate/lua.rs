//! Translates the Lua filter and the settings of routes for it. Compiles each script.

use std::{collections::HashMap, sync::Arc};

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

fn compile(code: &str) -> Result<Arc<LuaScript>> {
    let script =
        script::check(code).map_err(|problem| Reject::new(format!("script load error: {problem}")))?;
    Ok(Arc::new(script))
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
