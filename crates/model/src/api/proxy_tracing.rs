//! Traces in the settings of proxies ([`ProxySettings`](super::proxy_config::ProxySettings)).

use std::{
    collections::BTreeMap,
    hash::{Hash, Hasher},
};

use serde::Deserialize;
pub use skysail_core::node::TracingServiceName;

use super::{extension_provider::Zipkin, telemetry::CustomTag};

/// Traces of proxies to which no Telemetry applies, and defaults of those to which one does. Source:
/// `istio.mesh.v1alpha1.Tracing`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyTracing {
    /// Collector of Zipkin; that of the mesh configuration alone has an effect.
    pub zipkin: Option<ZipkinAddress>,
    /// Share of sampled requests; 0: the default.
    pub sampling: SampledShare,
    /// Tags.
    pub custom_tags: BTreeMap<String, CustomTag>,
    /// Maximum length of the path tag in bytes; 0: the default of the proxy.
    pub max_path_tag_length: u32,
    /// Whether spans have Istio's tags without a Telemetry; on by default.
    pub enable_istio_tags: Option<bool>,
}

/// Maximum number of tags in the settings of one proxy.
const MAX_TAGS: usize = 64;
/// Maximum size in bytes of the texts of these tags. Each connection manager of the proxy has them.
const MAX_TAG_BYTES: usize = 8 << 10;

impl ProxyTracing {
    /// Removes tags that a proxy would refuse, and those above the limits of one proxy. Returns their names.
    pub(crate) fn remove_bad_tags(&mut self) -> Vec<String> {
        let (mut count, mut bytes, mut removed) = (0, 0, Vec::new());
        self.custom_tags.retain(|name, tag| {
            let size = name.len() + tag.size();
            let is_kept =
                !name.is_empty() && tag.is_valid() && count < MAX_TAGS && bytes + size <= MAX_TAG_BYTES;
            if is_kept {
                (count, bytes) = (count + 1, bytes + size);
            } else {
                removed.push(name.clone());
            }
            is_kept
        });
        removed
    }
}

/// A share in percent. Two are equal if their bits are.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct SampledShare(pub f64);

impl PartialEq for SampledShare {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for SampledShare {}

impl Hash for SampledShare {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// Address of a collector of Zipkin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct ZipkinAddress {
    /// `HOST:PORT`.
    pub address: String,
}

impl ZipkinAddress {
    /// Returns the collectors that the address may mean, as providers; none if it is not `HOST:PORT`. As the search
    /// domains of a pod do, `NAME.NAMESPACE` stands for a service of Kubernetes before it is a host of its own.
    pub fn providers(&self) -> Vec<Zipkin> {
        let Some((host, port)) = self.address.rsplit_once(':').filter(|(host, _)| !host.is_empty()) else {
            return Vec::new();
        };
        let Ok(port) = port.parse::<u16>() else { return Vec::new() };
        let short = host.strip_suffix(".svc").unwrap_or(host);
        let is_short = short.matches('.').count() == 1 && !short.contains('/');
        let full = is_short.then(|| format!("{short}.svc.{CLUSTER_DOMAIN}"));
        let of = |service| Zipkin { service, port: port.into(), ..Zipkin::default() };
        full.into_iter().chain([host.to_owned()]).map(of).collect()
    }
}

/// Domain of the names of services.
const CLUSTER_DOMAIN: &str = "cluster.local";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectors_are_found_by_their_short_names() {
        let services = |address: &str| -> Vec<String> {
            let providers = ZipkinAddress { address: address.to_owned() }.providers();
            providers.into_iter().map(|of| format!("{}:{}", of.service, of.port)).collect()
        };
        let full = "zipkin.istio-system.svc.cluster.local:9411";
        for address in ["zipkin.istio-system:9411", "zipkin.istio-system.svc:9411"] {
            assert_eq!(services(address), [full, address]);
        }
        for literal in [full, "spans.example.com:80", "shop/example.com:80", "zipkin:9411"] {
            assert_eq!(services(literal), [literal]);
        }
        for bad in ["zipkin", ":1", "a:b"] {
            assert_eq!(services(bad), [""; 0], "{bad}");
        }
    }

    #[test]
    fn the_tags_of_a_proxy_are_bounded() {
        let read = |tags: &str| {
            serde_json::from_str::<ProxyTracing>(&format!("{{\"customTags\": {{{tags}}}}}")).unwrap()
        };
        let mut tracing = read(
            r#""a": {"literal": {"value": "x"}}, "": {"literal": {"value": "x"}}, "none": {}, "two": {"literal": {"value": "x"},
               "formatter": {"value": "y"}}, "name": {"header": {"name": "bad name"}}, "b": {"header": {"name": "x-own"}}"#,
        );
        assert_eq!(tracing.remove_bad_tags(), ["", "name", "none", "two"]);
        assert_eq!(tracing.custom_tags.keys().collect::<Vec<_>>(), ["a", "b"]);
        let many = |count: usize, size: usize| {
            let tags = (0..count).map(|number| {
                format!(r#""{number:03}": {{"literal": {{"value": "{}"}}}}"#, "x".repeat(size))
            });
            let mut tracing = read(&tags.collect::<Vec<_>>().join(", "));
            (tracing.remove_bad_tags().len(), tracing.custom_tags.len())
        };
        assert_eq!(many(70, 1), (6, MAX_TAGS));
        assert_eq!(many(9, 1_000), (1, 8));
    }
}
