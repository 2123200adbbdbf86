//! The Lua filter. Source: `envoy.extensions.filters.http.lua.v3`.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::route::Setting;

/// Settings of a Lua filter.
#[derive(Debug, Default, PartialEq)]
pub struct Lua {
    /// Script for requests whose route selects none (`default_source_code`, `inline_code`).
    pub default: Option<Arc<LuaScript>>,
    /// Scripts that routes select by name (`source_codes`).
    pub named: Vec<(Box<str>, Arc<LuaScript>)>,
    /// A change of the request's headers selects the route again (`clear_route_cache`).
    pub clear_route: bool,
    /// Values for `filterContext()`; a route may replace them.
    pub context: Arc<Map<String, Value>>,
}

/// A script, checked when the configuration arrived.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LuaScript {
    /// Source code.
    pub source: Box<str>,
    /// The script defines `envoy_on_request`.
    pub handles_request: bool,
    /// The script defines `envoy_on_response`.
    pub handles_response: bool,
}

/// A route's settings for a Lua filter. Source: `LuaPerRoute`.
#[derive(Debug, PartialEq)]
pub struct LuaRoute {
    /// Script of the route.
    pub script: LuaChoice,
    /// Values for `filterContext()`; `None`: those of the filter.
    pub context: Option<Arc<Map<String, Value>>>,
}

/// The script that a route selects.
#[derive(Debug, PartialEq, Eq)]
pub enum LuaChoice {
    /// The default script of the filter.
    Default,
    /// The script of this name in the filter. As in Envoy, an unknown name selects no script.
    Named(Box<str>),
    /// A script of the route.
    Own(Arc<LuaScript>),
}

/// A script and the values for its `filterContext()`.
pub type LuaSelection<'a> = (&'a Arc<LuaScript>, &'a Arc<Map<String, Value>>);

impl Lua {
    /// Returns the script for a request with this setting of its route.
    pub fn select<'a>(&'a self, setting: Option<&'a Setting>) -> Option<LuaSelection<'a>> {
        let Some(Setting::Lua(route)) = setting else {
            return self.default.as_ref().map(|script| (script, &self.context));
        };
        let script = match &route.script {
            LuaChoice::Default => self.default.as_ref(),
            LuaChoice::Named(name) => {
                self.named.iter().find(|(known, _)| known == name).map(|(_, script)| script)
            }
            LuaChoice::Own(script) => Some(script),
        };
        script.map(|script| (script, route.context.as_ref().unwrap_or(&self.context)))
    }
}

impl LuaScript {
    /// Returns whether the script may call a cluster, whose name only the script knows.
    pub fn may_call(&self) -> bool {
        self.source.contains("httpCall")
    }
}
