//! Pods that are gateways: their proxy is a container of the template, as in Istio's gateway injection. It receives
//! connections from outside, not those of a program beside it.

use crate::objects::{Container, Labels, PodSpec, repository};

/// Annotation that names the templates of Istio's injection.
const TEMPLATES: &str = "inject.istio.io/templates";
/// Image that the injection replaces.
const AUTO: &str = "auto";
/// Images of proxies, without registry and tag.
const PROXIES: [&str; 3] = ["proxyv2", "skysail-proxy", "istio-proxy"];
/// Label of the gateways that Istio installs.
const LABEL: &str = "istio";

/// Returns the name of the container that is the proxy of a gateway; `None` if the pod is no gateway.
pub(crate) fn proxy_container(spec: &PodSpec, labels: &Labels, annotations: &Labels) -> Option<String> {
    let templates = annotations.get(TEMPLATES).into_iter().flat_map(|list| list.split(','));
    let of_template = templates.map(str::trim).any(|name| name == "gateway");
    let of_label = labels.get(LABEL).is_some_and(|value| value.contains("gateway"));
    let is_gateway = |container: &&Container| {
        container.image == AUTO
            || of_template && container.name == "istio-proxy"
            || is_proxy(container)
                && (of_template || of_label || container.args.iter().any(|word| word == "router"))
    };
    spec.containers.iter().find(is_gateway).map(|container| container.name.clone())
}

fn is_proxy(container: &Container) -> bool {
    let name = repository(&container.image);
    PROXIES.contains(&name.rsplit('/').next().unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn proxy(container: serde_json::Value, labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> bool {
        let map = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let spec =
            serde_json::from_value(json!({"containers": [{"name": "other", "image": "i"}, container]}));
        proxy_container(&spec.unwrap(), &map(labels), &map(annotations)).is_some()
    }

    #[test]
    fn gateways_are_recognized_by_image_template_label_or_arguments() {
        let auto = json!({"name": "istio-proxy", "image": "auto"});
        let installed = json!({"name": "istio-proxy", "image": "docker.io/istio/proxyv2:1.32.0", "args": ["proxy", "router"]});
        let own = json!({"name": "edge", "image": "skysail-proxy"});
        let sidecar = json!({"name": "istio-proxy", "image": "istio/proxyv2", "args": ["proxy", "sidecar"]});
        let injected = json!({"name": "istio-proxy", "image": "any"});
        let (label, template) = (("istio", "ingressgateway"), (TEMPLATES, "gateway"));
        assert!(proxy(auto, &[], &[]));
        assert!(proxy(installed, &[], &[]));
        assert!(proxy(own.clone(), &[label], &[]) && !proxy(own, &[], &[]));
        assert!(proxy(injected.clone(), &[], &[template]) && !proxy(injected, &[label], &[]));
        assert!(!proxy(sidecar, &[], &[]));
    }
}
