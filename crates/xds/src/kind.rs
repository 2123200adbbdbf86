//! Resource types.

use std::fmt;

/// Type of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `envoy.config.cluster.v3.Cluster`
    Cluster,
    /// `envoy.config.endpoint.v3.ClusterLoadAssignment`
    Endpoint,
    /// `envoy.config.listener.v3.Listener`
    Listener,
    /// `envoy.config.route.v3.RouteConfiguration`
    Route,
    /// `envoy.config.route.v3.VirtualHost`, named `ROUTE CONFIGURATION/NAME`.
    VirtualHost,
    /// `envoy.extensions.transport_sockets.tls.v3.Secret`
    Secret,
    /// `envoy.config.core.v3.TypedExtensionConfig`
    ExtensionConfig,
    /// `istio.networking.nds.v1.NameTable`: host names and addresses for the proxy's DNS.
    NameTable,
}

impl Kind {
    /// All types in the order in which they are sent: clusters and endpoints before the listeners and routes that use
    /// them.
    pub const ALL: [Self; 8] = [
        Self::Cluster,
        Self::Endpoint,
        Self::Listener,
        Self::Route,
        Self::VirtualHost,
        Self::Secret,
        Self::ExtensionConfig,
        Self::NameTable,
    ];

    /// Returns the type URL.
    pub const fn url(self) -> &'static str {
        match self {
            Self::Cluster => "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            Self::Endpoint => "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            Self::Listener => "type.googleapis.com/envoy.config.listener.v3.Listener",
            Self::Route => "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
            Self::VirtualHost => "type.googleapis.com/envoy.config.route.v3.VirtualHost",
            Self::Secret => "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
            Self::ExtensionConfig => "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
            Self::NameTable => "type.googleapis.com/istio.networking.nds.v1.NameTable",
        }
    }

    /// Returns the type of a type URL; `None` if it is not served.
    pub fn from_url(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.url() == url)
    }

    /// Returns the short name of the discovery service as metrics use it: `cds`, `eds` and so on.
    pub const fn short(self) -> &'static str {
        match self {
            Self::Cluster => "cds",
            Self::Endpoint => "eds",
            Self::Listener => "lds",
            Self::Route => "rds",
            Self::VirtualHost => "vhds",
            Self::Secret => "sds",
            Self::ExtensionConfig => "ecds",
            Self::NameTable => "nds",
        }
    }

    /// Returns the name that subscribes to a group of resources, of which this is one. Only virtual hosts have such a
    /// name: that of their route configuration.
    pub fn family(self, name: &str) -> Option<&str> {
        let (family, _) = name.rsplit_once('/').filter(|_| self == Self::VirtualHost)?;
        Some(family)
    }

    /// Returns true if a name stands for all resources that have it as their [`family`](Self::family).
    pub(crate) fn is_family(self, name: &str) -> bool {
        self == Self::VirtualHost && !name.contains('/')
    }

    /// Returns true for types of which a client receives all resources unless it lists names.
    pub const fn is_wildcard(self) -> bool {
        matches!(self, Self::Cluster | Self::Listener | Self::VirtualHost | Self::NameTable)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.short())
    }
}
