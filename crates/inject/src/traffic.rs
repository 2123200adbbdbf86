//! The init container that redirects connections to the sidecar, or that waits for the CNI plugin to do so. The options
//! of its command are those of Istio's `istio-iptables`.

use std::collections::HashSet;

use serde_json::{Value, json};
use skysail_core::names::{HEALTH_PORT, INBOUND_PORT, METRICS_PORT, OUTBOUND_PORT};

use crate::{
    plan::{Mode, Plan},
    settings::Interceptor,
};

/// Container that redirects connections.
const INIT: &str = "istio-init";
/// Container that checks that a CNI plugin has redirected connections.
const VALIDATION: &str = "istio-validation";
/// User id 0, which may change the rules of the pod's network.
const ROOT: u64 = 0;

/// Returns the init container; `None` if no connections are redirected, as in a gateway.
pub(crate) fn container(plan: &Plan<'_>) -> Option<Value> {
    if plan.mode == Mode::None || !plan.is_sidecar() {
        return None;
    }
    let cni = plan.settings.interceptor == Interceptor::Cni;
    let mut security = json!({
        "allowPrivilegeEscalation": false,
        "privileged": false,
        "capabilities": { "drop": ["ALL"] },
        "seccompProfile": { "type": "RuntimeDefault" },
    });
    if cni {
        security["readOnlyRootFilesystem"] = json!(true);
        security["runAsNonRoot"] = json!(true);
        security["runAsUser"] = json!(plan.user);
        security["runAsGroup"] = json!(plan.group);
    } else {
        security["capabilities"]["add"] = json!(["NET_ADMIN"]);
        security["readOnlyRootFilesystem"] = json!(false);
        security["runAsNonRoot"] = json!(false);
        security["runAsUser"] = json!(ROOT);
        security["runAsGroup"] = json!(ROOT);
    }
    let mut container = json!({
        "name": if cni { VALIDATION } else { INIT },
        "image": plan.image,
        "args": arguments(plan, cni),
        "resources": plan.resources,
        "securityContext": security,
    });
    let variables = plan.variables();
    if !variables.is_empty() {
        container["env"] = Value::Array(variables);
    }
    plan.set_pull_policy(&mut container);
    Some(container)
}

/// Returns the arguments of the init container.
fn arguments(plan: &Plan<'_>, cni: bool) -> Vec<String> {
    let annotation = |name: &str| plan.annotations.get(&format!("traffic.sidecar.istio.io/{name}"));
    let mut arguments = vec!["intercept".to_owned()];
    let mut option = |name: &str, value: &str| arguments.extend([name.to_owned(), value.to_owned()]);
    option("-p", &OUTBOUND_PORT.to_string());
    option("-z", &INBOUND_PORT.to_string());
    option("-u", &plan.user.to_string());
    // A sidecar with a capability runs as root, and only its group identifies its connections.
    if plan.group != plan.user && plan.group > 0 {
        option("-g", &plan.group.to_string());
    }
    option("-m", plan.mode.as_str());
    option("-i", annotation("includeOutboundIPRanges").unwrap_or("*"));
    option("-x", annotation("excludeOutboundIPRanges").unwrap_or_default());
    option("-b", annotation("includeInboundPorts").unwrap_or("*"));
    option("-d", &excluded(plan.status_port, annotation("excludeInboundPorts").unwrap_or_default()));
    for (name, flag) in [("includeOutboundPorts", "-q"), ("excludeOutboundPorts", "-o")] {
        if let Some(ports) = annotation(name) {
            option(flag, ports);
        }
    }
    let interfaces = plan.annotations.get("istio.io/reroute-virtual-interfaces");
    if let Some(interfaces) = interfaces.or_else(|| annotation("kubevirtInterfaces")) {
        option("-k", interfaces);
    }
    if let Some(interfaces) = annotation("excludeInterfaces") {
        option("-c", interfaces);
    }
    if cni {
        arguments.extend(["--run-validation", "--skip-rule-apply"].map(str::to_owned));
    }
    arguments
}

/// Returns the ports on which connections to the pod are not redirected: those of the sidecar, and those of an annotation.
fn excluded(status_port: u16, ports: &str) -> String {
    let own = [METRICS_PORT, HEALTH_PORT, status_port].into_iter().filter(|port| *port > 0);
    // The annotation was checked: it has ports alone.
    let others = ports.split(',').filter_map(|port| port.trim().parse::<u16>().ok());
    let mut known = HashSet::new();
    let all = own.chain(others).filter(|port| known.insert(*port));
    all.map(|port| port.to_string()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ports_of_the_sidecar_are_excluded_once() {
        assert_eq!(excluded(15020, ""), "15090,15021,15020");
        assert_eq!(excluded(15020, "9000, 15020"), "15090,15021,15020,9000");
        assert_eq!(excluded(0, "9000"), "15090,15021,9000");
    }
}
