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
}
