//! Checks of WasmPlugins and TrafficExtensions: modules that must run and do not.

use super::{ObjectReport, Report};
use crate::{
    analysis::Code,
    api::{
        TrafficExtension, WasmPlugin,
        extension::{MAX_SCRIPTS, MAX_SCRIPTS_SIZE, PluginType},
    },
};

/// Remedy for a module that decides which requests pass.
const INSTEAD: &str = "use an AuthorizationPolicy with action CUSTOM, a RequestAuthentication, or lua in a TrafficExtension; \
                       failStrategy: FAIL_OPEN lets requests pass without the module";

impl Report<'_> {
    /// Reports a plugin whose requests are refused because its module does not run.
    pub(super) fn wasm_plugin(&mut self, about: &ObjectReport<'_, WasmPlugin>) {
        let spec = &about.entry.object.spec;
        // A fallback has no module.
        if spec.must_run() && !spec.url.is_empty() {
            self.module_not_run(about, "spec.url", spec.filter_type);
        }
    }

    /// Reports an extension whose requests are refused because its module does not run.
    pub(super) fn traffic_extension(&mut self, about: &ObjectReport<'_, TrafficExtension>) {
        let module = about.entry.object.spec.required_module();
        if let Some(module) = module.filter(|module| !module.url.is_empty()) {
            self.module_not_run(about, "spec.wasm.url", module.filter_type);
        }
        if self.world.exceeds_scripts(&about.entry.object) {
            let message = format!(
                "a workload with all scripts of its namespace exceeds {MAX_SCRIPTS} different ones or \
                 {MAX_SCRIPTS_SIZE} bytes: its requests are refused in place of this script"
            );
            let remedy = "remove or combine scripts; those of the root namespace and older ones come first";
            self.report(about, Code::PluginNotRun, "spec.lua.inlineCode", message, remedy);
        }
    }

    fn module_not_run<T>(&mut self, about: &ObjectReport<'_, T>, field: &str, filter_type: PluginType) {
        let what = match filter_type {
            PluginType::Http => "requests",
            PluginType::Network => "connections",
        };
        let message = format!(
            "Wasm is not run, and the module decides which {what} pass: those to and from the workloads that the \
             object selects are refused"
        );
        self.report(about, Code::PluginNotRun, field, message, INSTEAD);
    }
}
