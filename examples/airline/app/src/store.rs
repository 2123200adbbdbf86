//! The database of a service: JSON documents by their IDs, as in the document databases of Acme Air.
//!
//! There are two databases: an embedded one in a file of the service ([`embedded`]), and PostgreSQL ([`postgres`]). Both
//! offer single operations that are atomic. [`Store::update`] changes a document by comparing and swapping it, so no
//! operation holds a transaction open between two steps.

mod embedded;
mod postgres;

use std::{path::PathBuf, str::FromStr, sync::Arc};

use anyhow::Context as _;
use axum::http::StatusCode;
use serde::{Serialize, de::DeserializeOwned};

use crate::service::Failure;

/// Maximum number of attempts to change a document that others change at the same time.
const MAX_ATTEMPTS: u32 = 100;

/// Where a service keeps its documents.
#[derive(Clone)]
pub(crate) enum DatabaseSetting {
    /// An embedded database in a temporary file without a name. The documents are lost when the service ends.
    Temporary,
    /// An embedded database in this file.
    File(PathBuf),
    /// PostgreSQL.
    Postgres(Box<tokio_postgres::Config>),
}

impl std::fmt::Debug for DatabaseSetting {
    /// Leaves out the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Temporary => "Temporary",
            Self::File(_) => "File",
            Self::Postgres(_) => "Postgres",
        })
    }
}

impl FromStr for DatabaseSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "" => Err("expected temporary, a file, or postgresql://USER@HOST/NAME".to_owned()),
            "temporary" => Ok(Self::Temporary),
            _ if text.starts_with("postgresql://") || text.starts_with("postgres://") => {
                // The message has no part of the URL, which may contain a password.
                let config = text.parse().map_err(|error| format!("invalid URL of PostgreSQL: {error}"))?;
                Ok(Self::Postgres(Box::new(config)))
            }
            _ => Ok(Self::File(text.into())),
        }
    }
}

/// Documents of one kind. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Store(Arc<Backend>);

enum Backend {
    Embedded(embedded::EmbeddedStore),
    Postgres(Box<postgres::PostgresStore>),
}

/// Calls an operation of the database in use.
macro_rules! backend {
    ($store:expr, $operation:ident($($argument:expr),*)) => {
        match &*$store.0 {
            Backend::Embedded(store) => store.$operation($($argument),*).await,
            Backend::Postgres(store) => store.$operation($($argument),*).await,
        }
        .map_err(|error| unavailable(&error))
    };
}

impl Store {
    /// Opens the database. `table` is the name of the documents' table in PostgreSQL; it is created if it is missing.
    ///
    /// # Errors
    /// The file is not a database or in use, or PostgreSQL refuses the connection.
    pub(crate) async fn open(setting: &DatabaseSetting, table: &str) -> anyhow::Result<Self> {
        let backend = match setting {
            DatabaseSetting::Temporary => {
                let file = tempfile::tempfile().context(
                    "cannot make a temporary file for the database; --database names another file, or PostgreSQL",
                )?;
                Backend::Embedded(embedded::EmbeddedStore::open(file)?)
            }
            DatabaseSetting::File(path) => {
                let mut options = std::fs::OpenOptions::new();
                let file = options.read(true).write(true).create(true).truncate(false).open(path);
                let opened = file.map_err(anyhow::Error::from).and_then(embedded::EmbeddedStore::open);
                Backend::Embedded(
                    opened.with_context(|| format!("cannot open the database {}", path.display()))?,
                )
            }
            DatabaseSetting::Postgres(config) => {
                let opened = postgres::PostgresStore::open((**config).clone(), table).await;
                Backend::Postgres(Box::new(opened.context("cannot use PostgreSQL")?))
            }
        };
        Ok(Self(Arc::new(backend)))
    }

    /// Returns a document.
    pub(crate) async fn get<T: DeserializeOwned>(&self, id: &str) -> Result<Option<T>, Failure> {
        backend!(self, get(id))?.map(|text| parse(&text)).transpose()
    }

    /// Returns the documents whose IDs start with the prefix, in the order of their IDs.
    pub(crate) async fn starting_with<T: DeserializeOwned>(&self, prefix: &str) -> Result<Vec<T>, Failure> {
        backend!(self, starting_with(prefix))?.iter().map(|text| parse(text)).collect()
    }

    /// Adds a document, or replaces the one with the same ID.
    pub(crate) async fn put(&self, id: &str, document: &impl Serialize) -> Result<(), Failure> {
        let text = text(document)?;
        backend!(self, put(id, &text))
    }

    /// Changes a document. `change` may be called several times, if others change the document at the same time. Returns
    /// `None` if there is no such document.
    pub(crate) async fn update<T: DeserializeOwned + Serialize, R>(
        &self,
        id: &str,
        change: impl Fn(&mut T) -> Result<R, Failure>,
    ) -> Result<Option<R>, Failure> {
        for _ in 0..MAX_ATTEMPTS {
            let Some(before) = backend!(self, get(id))? else { return Ok(None) };
            let mut document = parse(&before)?;
            let result = change(&mut document)?;
            let after = text(&document)?;
            if backend!(self, swap(id, &before, &after))? {
                return Ok(Some(result));
            }
        }
        Err(Failure::new(StatusCode::CONFLICT, format!("too many changes of {id} at the same time")))
    }

    /// Removes a document and returns it.
    pub(crate) async fn remove<T: DeserializeOwned>(&self, id: &str) -> Result<Option<T>, Failure> {
        backend!(self, remove(id))?.map(|text| parse(&text)).transpose()
    }

    /// Replaces all documents.
    pub(crate) async fn load<T: Serialize>(&self, documents: Vec<(String, T)>) -> Result<(), Failure> {
        let texts = documents.into_iter().map(|(id, document)| Ok((id, text(&document)?)));
        let texts = texts.collect::<Result<Vec<(String, String)>, Failure>>()?;
        backend!(self, load(texts))
    }

    /// Returns the number of documents.
    pub(crate) async fn count(&self) -> Result<u64, Failure> {
        backend!(self, count())
    }
}

/// Returns the first text after all that start with the prefix.
fn end_of(prefix: &str) -> String {
    format!("{prefix}{}", char::MAX)
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, Failure> {
    serde_json::from_str(text)
        .map_err(|error| Failure::internal(format!("invalid document in the database: {error}")))
}

fn text(document: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(document).map_err(|error| Failure::internal(error.to_string()))
}

fn unavailable(error: &anyhow::Error) -> Failure {
    tracing::warn!(error = format!("{error:#}"), "the database failed");
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, format!("the database failed: {error:#}"))
}

#[cfg(test)]
pub(crate) mod tests;
