//! Settings of an installation.

use std::fmt;

/// Maximum length of a namespace and of a revision. Names of objects contain both.
const MAX_LABEL: usize = 63;
const MAX_REVISION: usize = 40;
/// Revision that is meant if none is named.
const DEFAULT_REVISION: &str = "default";
/// Namespace of control planes, by convention.
const DEFAULT_NAMESPACE: &str = "istio-system";

/// Place of a control plane: several of them can be in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Namespace.
    pub namespace: String,
    /// Revision, which namespaces and pods choose by the label `istio.io/rev`.
    pub revision: String,
}

/// Settings of an installation.
#[derive(Clone, Debug, PartialEq)]
pub struct Installation {
    /// Place of the control plane.
    pub target: Target,
    /// Image of skysaild.
    pub control_image: String,
    /// Image of skysail-proxy.
    pub proxy_image: String,
    /// Whether a CNI plugin redirects connections, instead of an init container.
    pub cni: bool,
    /// What the API server does with objects that the control plane does not validate in time.
    pub validation: Validation,
    /// Whether the control plane deploys the proxies of Gateways.
    pub deploys_gateways: bool,
    /// Number of replicas of the control plane. `None`: a HorizontalPodAutoscaler decides.
    pub replicas: Option<u32>,
    /// Further options of skysaild.
    pub arguments: Vec<String>,
    /// Port of discovery in plain text among these options.
    pub plain_port: Option<u16>,
}

/// Validation of objects by the control plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Validation {
    /// Objects are accepted while no control plane answers.
    #[default]
    Ignore,
    /// Objects are refused while no control plane answers.
    Fail,
    /// There is no webhook for validation.
    Off,
}

/// Error of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError(String);

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SettingsError {}

impl Target {
    /// Checks the names.
    ///
    /// # Errors
    /// The namespace or the revision is no name.
    pub fn new(namespace: &str, revision: &str) -> Result<Self, SettingsError> {
        for (what, name, max) in [("namespace", namespace, MAX_LABEL), ("revision", revision, MAX_REVISION)] {
            if !is_label(name, max) {
                return Err(SettingsError(format!(
                    "{name:?} is no {what}: write at most {max} lower-case letters, digits and hyphens"
                )));
            }
        }
        Ok(Self { namespace: namespace.to_owned(), revision: revision.to_owned() })
    }

    /// Returns whether this is the default revision.
    pub(crate) fn is_default(&self) -> bool {
        self.revision == DEFAULT_REVISION
    }

    /// Returns a name with the revision, unless it is the default one.
    fn with_revision(&self, name: &str) -> String {
        if self.is_default() { name.to_owned() } else { format!("{name}-{}", self.revision) }
    }

    /// Returns the name of the Deployment and of most other objects. It differs from that of istiod.
    pub(crate) fn name(&self) -> String {
        self.with_revision("skysaild")
    }

    /// Returns the name of the Service, under which Istio's tools and proxies find it.
    pub(crate) fn service(&self) -> String {
        self.with_revision("istiod")
    }

    /// Returns the name of the objects that no namespace contains.
    pub(crate) fn cluster_name(&self) -> String {
        format!("{}-{}", self.name(), self.namespace)
    }

    /// Returns the name of the configuration of the webhook for injection.
    pub(crate) fn webhook(&self) -> String {
        self.with_namespace("skysail-injector")
    }

    /// Returns the name of the configuration of the webhook for validation.
    pub(crate) fn validator(&self) -> String {
        self.with_namespace("skysail-validator")
    }

    fn with_namespace(&self, name: &str) -> String {
        let name = self.with_revision(name);
        if self.namespace == DEFAULT_NAMESPACE { name } else { format!("{name}-{}", self.namespace) }
    }
}

/// Returns whether a text is a DNS label (RFC 1123).
fn is_label(text: &str, max: usize) -> bool {
    let is_end =
        |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    text.len() <= max
        && is_end(text.bytes().next())
        && is_end(text.bytes().last())
        && text.bytes().all(|byte| byte == b'-' || is_end(Some(byte)))
}

/// Checks the name of an image: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]` (OCI Distribution Specification, "Pulling
/// manifests").
///
/// # Errors
/// The text is no such name.
pub fn check_image(image: &str) -> Result<(), SettingsError> {
    let error = |problem: &str| Err(SettingsError(format!("{image:?} is no name of an image: {problem}")));
    let (name, digest) = image.split_once('@').map_or((image, None), |(name, digest)| (name, Some(digest)));
    if let Some(digest) = digest {
        let hash = digest.strip_prefix("sha256:").unwrap_or_default();
        if hash.len() != 64 || !hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return error("the digest is not sha256: and 64 hexadecimal digits");
        }
    }
    let last = name.rfind('/').map_or(0, |slash| slash + 1);
    let (path, tag) = match name[last..].split_once(':') {
        Some((end, tag)) => (&name[..last + end.len()], Some(tag)),
        None => (name, None),
    };
    if let Some(tag) = tag {
        let is_tag = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if tag.is_empty() || tag.len() > 128 || tag.starts_with(['.', '-']) || !tag.bytes().all(is_tag) {
            return error("the tag has other characters than letters, digits, _, . and -");
        }
    }
    let mut parts = path.split('/');
    // The first part of several may be a host, with a port.
    if path.contains('/') {
        let host = parts.next().unwrap_or_default();
        let (host, port) = host.split_once(':').unwrap_or((host, "1"));
        let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if host.is_empty() || !host.bytes().all(is_host) || port.parse::<u16>().is_err() {
            return error("the part before the first slash is no host");
        }
    }
    let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_.-".contains(&byte);
    for part in parts {
        let is_end = |end: char| end.is_ascii_lowercase() || end.is_ascii_digit();
        if !part.starts_with(is_end) || !part.ends_with(is_end) || !part.bytes().all(is_part) {
            return error("write its path in lower-case letters and digits");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_have_names() {
        let digest = format!("a/b@sha256:{}", "0a".repeat(32));
        for valid in
            ["a", "a:1", "localhost/skysaild:0.1.0", "registry.example:5000/x/y-z/skysaild:V1_a.b-c", &digest]
        {
            assert_eq!(check_image(valid), Ok(()), "{valid}");
        }
        for invalid in [
            "",
            ":1",
            "a:",
            "A",
            "a b",
            "a/",
            "/a",
            "a//b",
            "a/B:1",
            "a:x/b",
            "a@sha256:0a",
            "a:-1",
            "a/b:1:2",
            "ä",
        ] {
            assert!(check_image(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn names_contain_the_revision_and_the_namespace() {
        let names = |namespace, revision| {
            let target = Target::new(namespace, revision).unwrap();
            [target.name(), target.service(), target.cluster_name(), target.webhook()]
        };
        let default = ["skysaild", "istiod", "skysaild-istio-system", "skysail-injector"];
        assert_eq!(names("istio-system", "default"), default);
        let canary =
            ["skysaild-canary", "istiod-canary", "skysaild-canary-mesh", "skysail-injector-canary-mesh"];
        assert_eq!(names("mesh", "canary"), canary);
        for invalid in ["", "A", "-a", "a-", "a.b", &"a".repeat(64)] {
            assert!(
                Target::new(invalid, "default").is_err() && Target::new("a", invalid).is_err(),
                "{invalid}"
            );
        }
    }
}
