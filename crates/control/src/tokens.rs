//! The keys that service account tokens are verified with, from files; those of a key set are watched.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use serde_json::Value;
use skysail_core::names::TOKEN_AUDIENCE;
use skysail_identity::{Live, Verifier, jwks::KeySet};
use skysail_source::watch_folder;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::audit::{Audit, Event};

/// How often to look without an event.
const LOOK: Duration = Duration::from_secs(10);

/// Sources of the keys, and the verifier that uses them.
pub(crate) struct Tokens {
    /// One key, PEM.
    pub(crate) key: Option<PathBuf>,
    /// A JSON web key set.
    pub(crate) jwks: Option<PathBuf>,
    pub(crate) issuers: Vec<String>,
    pub(crate) verifier: Arc<Live<Verifier>>,
}

/// Content read last.
type Texts = [Option<Vec<u8>>; 2];

impl Tokens {
    fn read(&self) -> anyhow::Result<Texts> {
        let read = |option: &str, path: &Option<PathBuf>| {
            let read =
                |path: &PathBuf| fs::read(path).with_context(|| format!("{option} {}", path.display()));
            path.as_ref().map(read).transpose()
        };
        Ok([read("--token-key", &self.key)?, read("--token-jwks", &self.jwks)?])
    }

    fn verifier(&self, texts: &Texts) -> anyhow::Result<Option<Verifier>> {
        let [key, jwks] = texts;
        let mut keys = match key {
            Some(pem) => KeySet::of_pem(pem).context("--token-key")?,
            None => KeySet::default(),
        };
        if let Some(text) = jwks {
            let set =
                KeySet::parse(text).map_err(|why| anyhow::anyhow!("--token-jwks {why}"))?.without_secrets();
            let all = serde_json::from_slice::<Value>(text)?["keys"].as_array().map_or(0, Vec::len);
            if set.0.is_empty() {
                bail!(
                    "--token-jwks holds {all} keys, and none is a public key of RSA, EC P-256, P-384 or Ed25519"
                );
            }
            if set.0.len() < all {
                warn!(left_out = all - set.0.len(), "--token-jwks holds keys of kinds that are not used");
            }
            keys.0.extend(set.0);
        }
        Ok((!keys.0.is_empty()).then(|| Verifier::new(keys, TOKEN_AUDIENCE, &self.issuers)))
    }

    /// Reads the keys for the first time.
    ///
    /// # Errors
    /// When a file cannot be read or holds something else.
    pub(crate) fn load(&self) -> anyhow::Result<Texts> {
        let texts = self.read()?;
        if let Some(verifier) = self.verifier(&texts)? {
            self.verifier.set(Arc::new(verifier));
        }
        Ok(texts)
    }

    /// Watches the files until the process ends, starting from the content read first.
    pub(crate) async fn follow(self, mut texts: Texts, audit: Arc<Audit>) {
        let changed = Arc::new(Notify::new());
        let folders = [&self.key, &self.jwks].into_iter().flatten().filter_map(|path| path.parent());
        let _watchers: Vec<_> = folders.map(|folder| watch_folder(folder, &changed)).collect();
        let mut problem = None;
        loop {
            let _ = tokio::time::timeout(LOOK, changed.notified()).await;
            match self.read().and_then(|now| Ok((self.verifier(&now)?, now))) {
                Ok((_, now)) if now == texts => problem = None,
                Ok((verifier, now)) => {
                    (texts, problem) = (now, None);
                    if let Some(verifier) = verifier {
                        self.verifier.set(Arc::new(verifier));
                        info!("the keys for tokens were replaced");
                        let files = [&self.key, &self.jwks].into_iter().flatten();
                        let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
                        audit.record(Event::TokensChanged { files: &files });
                    }
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    if problem.as_ref() != Some(&error) {
                        warn!(error, "the keys for tokens cannot be read; those before stay in use");
                    }
                    problem = Some(error);
                }
            }
        }
    }
}
