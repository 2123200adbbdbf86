//! Validation of WasmPlugin and TrafficExtension.

use super::{Code, Finding, Findings, security};
use crate::api::{
    TrafficExtension, WasmPlugin,
    extension::{MAX_SCRIPT, TrafficSelector},
};

/// Remedy for a module without an effect.
const INSTEAD: &str = "use lua in a TrafficExtension, an external authorizer, or ext_proc in an EnvoyFilter";

/// Checks a WasmPlugin.
pub(crate) fn wasm_plugin(spec: &WasmPlugin) -> Vec<Finding> {
    let mut findings = Findings::default();
    security::attachment(spec.selector.is_some(), spec.target_ref.as_ref(), &spec.target_refs, &mut findings);
    module(&spec.url, "spec.url", spec.must_run(), &mut findings);
    ports(&spec.matches, &mut findings);
    findings.done()
}

/// Checks a TrafficExtension.
pub(crate) fn traffic_extension(spec: &TrafficExtension) -> Vec<Finding> {
    let mut findings = Findings::default();
    security::attachment(spec.selector.is_some(), None, &spec.target_refs, &mut findings);
    match (&spec.wasm, &spec.lua) {
        (Some(_), Some(_)) => {
            let message = "is not allowed together with lua";
            findings.add(Code::ExclusiveFields, "spec.wasm", message, "remove one of them");
        }
        (None, None) => {
            findings.add(Code::MissingField, "spec.lua", "is missing, as is wasm", "set lua.inlineCode");
        }
        (Some(wasm), None) => {
            module(&wasm.url, "spec.wasm.url", spec.required_module().is_some(), &mut findings);
        }
        (None, Some(lua)) => {
            let (field, size) = ("spec.lua.inlineCode", lua.inline_code.len());
            if size == 0 {
                findings.add(Code::MissingField, field, "is missing", "write the script");
            } else if size > MAX_SCRIPT {
                let message = format!("has {size} bytes; {MAX_SCRIPT} are the most");
                findings.add(Code::OutOfRange, field, message, "shorten the script");
            }
        }
    }
    ports(&spec.matches, &mut findings);
    findings.done()
}

/// Checks a Wasm module. `must_run` is whether requests must not pass without it; the World reports this.
fn module(url: &str, field: &str, must_run: bool, findings: &mut Findings) {
    if url.is_empty() {
        findings.add(Code::MissingField, field, "is missing", "set the URL of the module");
    } else if !must_run {
        let message = "is not supported: Wasm is not run, so requests pass without the module";
        findings.add(Code::UnsupportedField, field, message, INSTEAD);
    }
}

fn ports(matches: &[TrafficSelector], findings: &mut Findings) {
    for (index, found) in matches.iter().enumerate() {
        for (position, port) in found.ports.iter().enumerate() {
            if !(1..=65535).contains(&port.number) {
                let field = format!("spec.match[{index}].ports[{position}].number");
                findings.add(
                    Code::InvalidPort,
                    field,
                    format!("{} is not a port", port.number),
                    "use a number from 1 to 65535",
                );
            }
        }
    }
}
