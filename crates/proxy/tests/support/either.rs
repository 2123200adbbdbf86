//! The sidecar and Envoy with the same bootstrap file.

use std::net::SocketAddr;

use crate::{envoy::Running, program::Program};

/// The sidecar or Envoy.
pub(crate) enum Either {
    Envoy(Running),
    Skysail { program: Program, _folder: tempfile::TempDir },
}

impl Either {
    pub(crate) async fn both(bootstrap: &str) -> [Self; 2] {
        let folder = tempfile::tempdir().unwrap();
        let program = Program::start(folder.path(), bootstrap).await;
        [Self::Envoy(Running::start(bootstrap).await), Self::Skysail { program, _folder: folder }]
    }

    pub(crate) async fn listener(&self, name: &str) -> SocketAddr {
        match self {
            Self::Envoy(envoy) => envoy.listener(name).await,
            Self::Skysail { program, .. } => program.listener(name).await,
        }
    }

    /// Requests a page of the admin port and returns the response.
    #[allow(dead_code, reason = "each test file uses a part of it")]
    pub(crate) async fn page(&self, path: &str) -> String {
        match self {
            Self::Envoy(envoy) => envoy.page(path).await,
            Self::Skysail { program, .. } => program.page("GET", path).await,
        }
    }
}
