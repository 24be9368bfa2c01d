//! A machine of a lab: a network namespace and a runtime whose threads live in it, so that what the testbed runs in this
//! process (deployment, relay, agent) opens its sockets there.

use anyhow::Context as _;
use tokio::runtime::{Builder, Runtime};

use crate::netns::Namespace;

/// One machine. Whatever still runs on it ends with it.
#[derive(Debug)]
pub struct Machine {
    namespace: Namespace,
    runtime: Option<Runtime>,
}

impl Machine {
    pub fn new(name: &str) -> anyhow::Result<Self> {
        let namespace = Namespace::new(name)?;
        // Worker threads inherit the namespace of the thread that builds the runtime, and further threads theirs.
        let build = || Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let built = namespace.thread(build).join().map_err(|_| anyhow::anyhow!("building a runtime panicked"))?;
        let runtime = built?.context("a runtime can be made")?;
        Ok(Self { namespace, runtime: Some(runtime) })
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Runs `body` here; tasks and threads that it starts belong here, too.
    pub async fn run<F>(&self, body: F) -> anyhow::Result<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let runtime = self.runtime.as_ref().context("the machine runs")?;
        runtime.spawn(body).await.context("a task of a machine panicked")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A runtime may not be waited for inside another one.
            runtime.shutdown_background();
        }
    }
}

/// Addresses are usable at once: nobody else is on these cables.
pub(super) const NO_DUPLICATE_DETECTION: &str = "net/ipv6/conf/default/accept_dad=0 net/ipv6/conf/all/accept_dad=0";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::Setup;

    #[test]
    fn what_runs_on_a_machine_has_its_network() {
        Setup::new().run(async || -> anyhow::Result<()> {
            let machine = Machine::new("other")?;
            machine.namespace().join("10.9.0.1/24", "10.9.0.2/24")?;
            let bind = || async { tokio::net::UdpSocket::bind("10.9.0.2:0").await.map(drop) };
            machine.run(bind()).await??;
            let blocking =
                async { tokio::task::spawn_blocking(|| std::net::UdpSocket::bind("10.9.0.2:0").map(drop)).await };
            machine.run(blocking).await???;
            anyhow::ensure!(bind().await.is_err(), "the address is that machine's alone");
            Ok(())
        });
    }
}
