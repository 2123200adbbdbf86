//! PostgreSQL as the database. One connection carries all operations; each is one statement, and concurrent ones are
//! pipelined. An operation opens the connection again once its end was seen.

use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::Mutex;
use tokio_postgres::{Client, Config, NoTls, Statement};

/// Maximum number of documents that one statement inserts.
const BATCH: usize = 1_000;

/// A table of documents.
pub(super) struct PostgresStore {
    config: Config,
    table: String,
    session: Mutex<Arc<Session>>,
}

/// A connection with its prepared statements.
struct Session {
    client: Client,
    get: Statement,
    starting_with: Statement,
    put: Statement,
    swap: Statement,
    remove: Statement,
    count: Statement,
}

impl PostgresStore {
    /// Connects, and creates the table if it is missing. `table` must be a plain identifier.
    pub(super) async fn open(config: Config, table: &str) -> anyhow::Result<Self> {
        let session = Arc::new(Session::open(&config, table).await?);
        Ok(Self { config, table: table.to_owned(), session: Mutex::new(session) })
    }

    pub(super) async fn get(&self, id: &str) -> anyhow::Result<Option<String>> {
        let session = self.session().await?;
        let row = session.client.query_opt(&session.get, &[&id]).await?;
        Ok(row.map(|row| row.try_get(0)).transpose()?)
    }

    pub(super) async fn starting_with(&self, prefix: &str) -> anyhow::Result<Vec<String>> {
        let session = self.session().await?;
        let rows = session.client.query(&session.starting_with, &[&prefix, &super::end_of(prefix)]).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    pub(super) async fn put(&self, id: &str, text: &str) -> anyhow::Result<()> {
        let session = self.session().await?;
        session.client.execute(&session.put, &[&id, &text]).await?;
        Ok(())
    }

    /// Replaces a document if it is still the expected one.
    pub(super) async fn swap(&self, id: &str, before: &str, after: &str) -> anyhow::Result<bool> {
        let session = self.session().await?;
        Ok(session.client.execute(&session.swap, &[&id, &before, &after]).await? > 0)
    }

    pub(super) async fn remove(&self, id: &str) -> anyhow::Result<Option<String>> {
        let session = self.session().await?;
        let row = session.client.query_opt(&session.remove, &[&id]).await?;
        Ok(row.map(|row| row.try_get(0)).transpose()?)
    }

    /// Replaces all documents in one transaction, on a connection of its own: statements of others must not be part of
    /// the transaction.
    pub(super) async fn load(&self, documents: Vec<(String, String)>) -> anyhow::Result<()> {
        let mut client = connect(&self.config).await?;
        let transaction = client.transaction().await?;
        transaction.execute(&format!("DELETE FROM {}", self.table), &[]).await?;
        let insert = format!("INSERT INTO {} SELECT * FROM unnest($1::text[], $2::text[])", self.table);
        let insert = transaction.prepare(&insert).await?;
        for part in documents.chunks(BATCH) {
            let (ids, texts): (Vec<&str>, Vec<&str>) = part.iter().map(|(id, text)| (&**id, &**text)).unzip();
            transaction.execute(&insert, &[&ids, &texts]).await?;
        }
        Ok(transaction.commit().await?)
    }

    pub(super) async fn count(&self) -> anyhow::Result<u64> {
        let session = self.session().await?;
        let number: i64 = session.client.query_one(&session.count, &[]).await?.try_get(0)?;
        Ok(number.unsigned_abs())
    }

    /// Returns the connection, or a new one if it was lost.
    async fn session(&self) -> anyhow::Result<Arc<Session>> {
        let mut session = self.session.lock().await;
        if session.client.is_closed() {
            *session = Arc::new(Session::open(&self.config, &self.table).await?);
        }
        Ok(Arc::clone(&session))
    }
}

impl Session {
    async fn open(config: &Config, table: &str) -> anyhow::Result<Self> {
        let client = connect(config).await?;
        // The order of IDs is that of their bytes, as in the embedded database. Two services that create the same table at
        // the same time would conflict without the lock, which ends with the transaction of the two statements.
        let create = format!(
            "SELECT pg_advisory_xact_lock(4711); \
             CREATE TABLE IF NOT EXISTS {table} (id text COLLATE \"C\" PRIMARY KEY, document text NOT NULL)"
        );
        client.batch_execute(&create).await?;
        let prepare = async |text: &str| client.prepare(&text.replace("TABLE", table)).await;
        Ok(Self {
            get: prepare("SELECT document FROM TABLE WHERE id = $1").await?,
            starting_with: prepare("SELECT document FROM TABLE WHERE id >= $1 AND id < $2 ORDER BY id").await?,
            put: prepare(
                "INSERT INTO TABLE VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET document = excluded.document",
            )
            .await?,
            swap: prepare("UPDATE TABLE SET document = $3 WHERE id = $1 AND document = $2").await?,
            remove: prepare("DELETE FROM TABLE WHERE id = $1 RETURNING document").await?,
            count: prepare("SELECT count(*) FROM TABLE").await?,
            client,
        })
    }
}

/// Opens a connection.
async fn connect(config: &Config) -> anyhow::Result<Client> {
    let (client, connection) = config.connect(NoTls).await.context("cannot connect")?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::warn!(%error, "the connection to PostgreSQL was lost");
        }
    });
    Ok(client)
}
