//! Credentials of listeners: their certificates, and the roots that verify their clients.

use super::{CONFIG_MAP, Referrer};
use crate::{
    api::{
        Kind, Meta, Typed,
        gateway_api::{
            FrontendValidation, FrontendValidationMode, KubernetesGateway, Listener, ListenerTls,
            ListenerTlsMode, ObjectReference,
        },
    },
    world::World,
};

/// Scheme of the credentials of internal Gateways: `kubernetes-gateway://NAMESPACE/NAME`.
pub(crate) const CREDENTIAL: &str = "kubernetes-gateway://";

/// Reason for which the certificate that a Gateway presents to servers is refused.
const INVALID_CLIENT_CERTIFICATE: &str = "InvalidClientCertificateRef";

/// Suffix of the name of the roots of a credential.
pub(crate) const ROOTS: &str = "-cacert";

/// Reason and message for which a reference is refused.
pub(super) type RefusedReference = (&'static str, String);

/// Credentials of a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Credentials {
    /// Names of the certificates.
    pub(super) certificates: Vec<String>,
    /// Name of the roots for clients, and which clients are accepted; `None` if clients need no certificate.
    pub(super) clients: Option<(String, FrontendValidationMode)>,
}

impl World {
    /// Returns the credentials of a listener of a Gateway or ListenerSet; fails if one is refused.
    pub(super) fn credentials(
        &self,
        (kind, meta): (Kind, &Meta),
        gateway: &Typed<KubernetesGateway>,
        listener: &Listener,
    ) -> Result<Credentials, RefusedReference> {
        let Some(tls) = listener.tls.as_ref().filter(|tls| tls.mode == ListenerTlsMode::Terminate) else {
            return Ok(Credentials::default());
        };
        let certificates = self.certificates(&self.referrer(kind, meta, true), tls)?;
        let frontend = gateway.spec.tls.as_ref().and_then(|tls| tls.frontend.of_port(listener.port));
        let of_gateway = self.referrer(Kind::KubernetesGateway, &gateway.meta, true);
        let clients = frontend.map(|validation| self.client_roots(&of_gateway, validation)).transpose()?;
        Ok(Credentials { certificates, clients: clients.flatten() })
    }

    /// Returns why a listener cannot be served with its credentials: none of its certificates exists, or its roots do not.
    /// The listener is compiled nevertheless, so that it is served as soon as they come.
    pub(super) fn missing(&self, of: &Credentials) -> Option<RefusedReference> {
        let has_pair = |name: &String| self.has_pair(name);
        if let Some(first) = of.certificates.first().filter(|_| !of.certificates.iter().any(has_pair)) {
            let path = first.trim_start_matches(CREDENTIAL);
            let message = format!(
                "invalid certificate reference, secret {path} not found, or without tls.crt (PEM) and tls.key"
            );
            return Some(("InvalidCertificateRef", message));
        }
        let (roots, _) = of.clients.as_ref()?;
        let (namespace, name) = place(roots)?;
        let name = name.strip_suffix(ROOTS)?;
        let exists = match roots.starts_with(CONFIG_MAP) {
            true => self.root_map(namespace, name).is_some(),
            false => self.secret(namespace, name).is_some_and(|of| of.roots().is_some()),
        };
        (!exists).then(|| {
            let message =
                format!("invalid CA certificate reference, {namespace}/{name} not found, or without ca.crt");
            ("InvalidCACertificateRef", message)
        })
    }

    /// Returns the credential that a Gateway presents to servers with a BackendTLSPolicy; fails if its reference is
    /// refused.
    pub(super) fn client_credential(
        &self,
        gateway: &Typed<KubernetesGateway>,
    ) -> Result<Option<String>, RefusedReference> {
        let backend = gateway.spec.tls.as_ref().map(|tls| &tls.backend);
        let Some(of) = backend.and_then(|backend| backend.client_certificate_ref.as_ref()) else {
            return Ok(None);
        };
        let to = secret_reference(of);
        if to != ("", "Secret") {
            let message = format!("clientCertificateRef of kind {}/{} is not supported", to.0, to.1);
            return Err((INVALID_CLIENT_CERTIFICATE, message));
        }
        let (_, namespace) = self.proxies_of(gateway);
        if namespace != gateway.meta.namespace {
            let message = format!(
                "clientCertificateRef: the proxies are in namespace {namespace}, whose connections a Gateway of another \
                 namespace does not change"
            );
            return Err((INVALID_CLIENT_CERTIFICATE, message));
        }
        let of_gateway = self.referrer(Kind::KubernetesGateway, &gateway.meta, true);
        Ok(Some(format!("{CREDENTIAL}{}", of_gateway.permitted("clientCertificateRef", of, to)?)))
    }

    /// Returns why a Gateway cannot present its certificate to servers. As for listeners, proxies have the name of a
    /// Secret that does not exist, and connect as soon as it comes.
    pub(super) fn refused_client_credential(
        &self,
        gateway: &Typed<KubernetesGateway>,
    ) -> Option<RefusedReference> {
        let credential = match self.client_credential(gateway) {
            Ok(credential) => credential?,
            Err(refused) => return Some(refused),
        };
        (!self.has_pair(&credential)).then(|| {
            let path = credential.trim_start_matches(CREDENTIAL);
            let message = format!(
                "clientCertificateRef: secret {path} not found, or without tls.crt (PEM) and tls.key"
            );
            (INVALID_CLIENT_CERTIFICATE, message)
        })
    }

    /// Returns whether the Secret of a credential has a certificate in PEM form, and a key.
    fn has_pair(&self, credential: &str) -> bool {
        place(credential)
            .and_then(|(namespace, name)| self.secret(namespace, name))
            .is_some_and(|of| of.pair().is_some_and(|pair| pair.has_certificate()))
    }

    /// Returns whether a policy or a Gateway refers to a ConfigMap with certificates.
    pub(in crate::world) fn uses_root_map(&self, namespace: &str, name: &str) -> bool {
        let mut policies = self.backend_tls_policies.in_namespace(namespace);
        let is_of_policy = policies.any(|entry| {
            let refs = &entry.object.spec.validation.ca_certificate_refs;
            refs.iter().any(|of| of.name == name)
        });
        let mut gateways = self.kubernetes_gateways.iter().map(|entry| &*entry.object);
        is_of_policy
            || gateways.any(|gateway| {
                let mut refs = gateway
                    .spec
                    .tls
                    .iter()
                    .flat_map(|tls| tls.frontend.validations())
                    .flat_map(|of| &of.ca_certificate_refs);
                refs.any(|of| {
                    of.name == name && of.namespace.as_ref().unwrap_or(&gateway.meta.namespace) == namespace
                })
            })
    }

    fn certificates(
        &self,
        referrer: &Referrer<'_>,
        tls: &ListenerTls,
    ) -> Result<Vec<String>, RefusedReference> {
        let mut made = Vec::new();
        for of in &tls.certificate_refs {
            let to = secret_reference(of);
            if to != ("", "Secret") {
                let message = format!("certificateRefs of kind {}/{} are not supported", to.0, to.1);
                return Err(("InvalidCertificateRef", message));
            }
            made.push(format!("{CREDENTIAL}{}", referrer.permitted("certificateRef", of, to)?));
        }
        Ok(made)
    }

    /// Returns the roots that verify clients. As in Istio, there may be one reference.
    fn client_roots(
        &self,
        referrer: &Referrer<'_>,
        validation: &FrontendValidation,
    ) -> Result<Option<(String, FrontendValidationMode)>, RefusedReference> {
        let of = match validation.ca_certificate_refs.as_slice() {
            [] => return Ok(None),
            [of] => of,
            _ => {
                return Err(("InvalidCACertificateRef", "only one caCertificateRef is supported".to_owned()));
            }
        };
        let to = (of.group.as_deref().unwrap_or_default(), of.kind.as_deref().unwrap_or_default());
        let scheme = match to {
            ("", "ConfigMap") => CONFIG_MAP,
            ("", "Secret") => CREDENTIAL,
            (group, kind) => {
                let message = format!("caCertificateRefs of kind {group}/{kind} are not supported");
                return Err(("InvalidCACertificateKind", message));
            }
        };
        let path = referrer.permitted("caCertificateRef", of, to)?;
        Ok(Some((format!("{scheme}{path}{ROOTS}"), validation.mode)))
    }
}

/// Returns the API group and the kind of a reference that is to a Secret by default.
fn secret_reference(of: &ObjectReference) -> (&str, &str) {
    (of.group.as_deref().unwrap_or_default(), of.kind.as_deref().unwrap_or("Secret"))
}

/// Returns namespace and name of a credential.
fn place(credential: &str) -> Option<(&str, &str)> {
    credential.split_once("://")?.1.split_once('/')
}

impl Referrer<'_> {
    /// Returns `NAMESPACE/NAME` of an object that a field of a Gateway refers to; fails without a ReferenceGrant.
    fn permitted(
        &self,
        field: &str,
        of: &ObjectReference,
        to: (&str, &str),
    ) -> Result<String, RefusedReference> {
        let namespace = of.namespace.as_deref().unwrap_or(self.namespace);
        if self.may_refer(namespace, to, &of.name) {
            return Ok(format!("{namespace}/{}", of.name));
        }
        let message = format!(
            "{field} {}/{namespace} not accessible to a Gateway in namespace \"{}\" (missing a ReferenceGrant?)",
            of.name, self.namespace
        );
        Err(("RefNotPermitted", message))
    }
}
