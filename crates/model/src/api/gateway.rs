//! Gateway: ports that gateway proxies open for a mesh's clients. Fields are Istio's (`networking.istio.io`).

use serde::Deserialize;

use super::{Labels, Protocol};

/// Credential that is the proxy's certificate of the mesh.
pub(crate) const MESH_CREDENTIAL: &str = "builtin://";

/// `spec` of a Gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Gateway {
    /// Labels of the proxies that the Gateway configures, in any namespace; empty: all gateways.
    pub selector: Labels,
    /// Ports and the hosts served on them.
    pub servers: Vec<Server>,
    /// Namespace of the proxies that it selects; `None`: all. Set if it is made from a Gateway of Gateway API.
    #[serde(skip)]
    pub only_in: Option<String>,
    /// Names of the Services, in that namespace, whose ports precede those of others that lead to the proxies. Set if the
    /// Gateway of Gateway API from which it is made names Services as its addresses.
    #[serde(skip)]
    pub services: Vec<String>,
    /// Credential that the proxies present to servers with a BackendTLSPolicy. Set if the Gateway of Gateway API from
    /// which it is made has one.
    #[serde(skip)]
    pub client_credential: Option<String>,
}

/// Hosts on a port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Server {
    /// Name, for people.
    pub name: String,
    /// Port.
    pub port: Option<ServerPort>,
    /// Address to listen on; empty: all.
    pub bind: String,
    /// Hosts, with an optional namespace of the VirtualServices that may use them: `NAMESPACE/HOST`.
    pub hosts: Vec<String>,
    /// TLS of clients.
    pub tls: Option<ServerTls>,
    /// Default endpoint; Istio does not implement it either.
    pub default_endpoint: String,
}

/// Port of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServerPort {
    /// Number of the port of the gateway's Service.
    pub number: u32,
    /// Protocol.
    pub protocol: String,
    /// Name, unique within the Gateway.
    pub name: String,
    /// Deprecated by Istio and without effect.
    pub target_port: u32,
}

/// TLS of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServerTls {
    /// Whether requests in plain text are redirected to HTTPS (HTTP only).
    pub https_redirect: bool,
    /// Mode.
    pub mode: ServerTlsMode,
    /// File of the certificate chain.
    pub server_certificate: String,
    /// File of the private key.
    pub private_key: String,
    /// File of the roots that verify clients.
    pub ca_certificates: String,
    /// File of the revocation list.
    pub ca_crl: String,
    /// Certificates in files, one for each kind of key.
    pub tls_certificates: Vec<TlsCertificate>,
    /// Name of the Secret with certificate and key, in the namespace of the proxy.
    pub credential_name: String,
    /// Names of Secrets, one for each kind of key.
    pub credential_names: Vec<String>,
    /// Name of the Secret with the roots that verify clients.
    pub ca_cert_credential_name: String,
    /// Accepted names of clients.
    pub subject_alt_names: Vec<String>,
    /// Hashes of the public keys of accepted clients, base64.
    pub verify_certificate_spki: Vec<String>,
    /// Hashes of the certificates of accepted clients, hexadecimal.
    pub verify_certificate_hash: Vec<String>,
    /// Minimum version.
    pub min_protocol_version: TlsVersion,
    /// Maximum version.
    pub max_protocol_version: TlsVersion,
    /// Cipher suites below TLS 1.3.
    pub cipher_suites: Vec<String>,
    /// Curves of the key exchange.
    pub ecdh_curves: Vec<String>,
    /// Whether certificates of clients are not verified.
    pub insecure_skip_verify: Option<bool>,
}

/// Certificate in files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TlsCertificate {
    /// File of the certificate chain.
    pub server_certificate: String,
    /// File of the private key.
    pub private_key: String,
    /// File of the roots that verify clients, if the server has no other.
    pub ca_certificates: String,
}

/// Mode of TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ServerTlsMode {
    /// TLS is forwarded; the server name selects the route.
    #[default]
    Passthrough,
    /// The gateway presents a certificate.
    Simple,
    /// Both sides present certificates.
    Mutual,
    /// TLS is forwarded to the service that the server name encodes.
    AutoPassthrough,
    /// Mutual TLS with the certificates of the mesh.
    IstioMutual,
    /// Clients may present a certificate.
    OptionalMutual,
}

/// Version of TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum TlsVersion {
    /// Default of the proxy.
    #[default]
    #[serde(rename = "TLS_AUTO")]
    Auto,
    /// TLS 1.0.
    #[serde(rename = "TLSV1_0")]
    V1_0,
    /// TLS 1.1.
    #[serde(rename = "TLSV1_1")]
    V1_1,
    /// TLS 1.2.
    #[serde(rename = "TLSV1_2")]
    V1_2,
    /// TLS 1.3.
    #[serde(rename = "TLSV1_3")]
    V1_3,
}

impl Server {
    /// Returns the number of the port; 0 without one.
    pub fn number(&self) -> u16 {
        self.port.as_ref().and_then(|port| u16::try_from(port.number).ok()).unwrap_or_default()
    }

    /// Returns the protocol; `None` if it is unknown.
    pub fn protocol(&self) -> Option<Protocol> {
        self.port.as_ref().and_then(|port| Protocol::parse(&port.protocol))
    }

    /// Returns whether the server speaks HTTP in plain text.
    pub fn is_plain_http(&self) -> bool {
        self.protocol().is_some_and(Protocol::is_http)
    }

    /// Returns the TLS settings of a server whose clients speak TLS.
    pub fn terminating_or_forwarded_tls(&self) -> Option<&ServerTls> {
        self.tls.as_ref().filter(|_| !self.is_plain_http())
    }

    /// Returns whether the gateway parses requests.
    pub fn is_http(&self) -> bool {
        let terminated = self.tls.as_ref().is_some_and(|tls| !tls.mode.is_passthrough());
        self.is_plain_http() || self.protocol() == Some(Protocol::Https) && terminated
    }
}

impl ServerTls {
    /// Returns the names of the Secrets with certificates; none if the certificate is that of the mesh.
    pub fn credentials(&self) -> Vec<&str> {
        let one = std::iter::once(&self.credential_name).filter(|_| self.credential_names.is_empty());
        let names = self.credential_names.iter().chain(one);
        names.map(String::as_str).filter(|name| !name.is_empty() && *name != MESH_CREDENTIAL).collect()
    }

    /// Returns whether the proxy's certificate of the mesh is presented.
    pub(crate) fn has_mesh_certificate(&self) -> bool {
        self.mode == ServerTlsMode::IstioMutual || self.credential_name == MESH_CREDENTIAL
    }

    /// Returns the file of the roots that verify clients; empty for none. The field of the server comes first, then
    /// those of its certificates.
    pub fn root_file(&self) -> &str {
        let of_pairs = self.tls_certificates.iter().map(|pair| &pair.ca_certificates);
        let all = std::iter::once(&self.ca_certificates).chain(of_pairs);
        all.map(String::as_str).find(|file| !file.is_empty()).unwrap_or_default()
    }

    /// Returns whether clients with an invalid certificate are accepted. With mutual TLS of the mesh, they never are.
    pub(crate) fn accepts_untrusted(&self) -> bool {
        self.insecure_skip_verify == Some(true)
            && matches!(self.mode, ServerTlsMode::Mutual | ServerTlsMode::OptionalMutual)
    }

    /// Returns whether the revocation list of `caCrl` verifies clients: only together with roots in a file or a Secret.
    pub fn has_list(&self) -> bool {
        let has_roots = !self.root_file().is_empty()
            || !self.ca_cert_credential_name.is_empty()
            || !self.credentials().is_empty();
        let verifies = matches!(self.mode, ServerTlsMode::Mutual | ServerTlsMode::OptionalMutual);
        verifies && has_roots && !self.ca_crl.is_empty()
    }
}

impl ServerTlsMode {
    /// Returns whether TLS is forwarded.
    pub fn is_passthrough(self) -> bool {
        matches!(self, Self::Passthrough | Self::AutoPassthrough)
    }

    /// Returns whether certificates of clients are verified.
    pub fn verifies_clients(self) -> bool {
        matches!(self, Self::Mutual | Self::OptionalMutual | Self::IstioMutual)
    }
}
