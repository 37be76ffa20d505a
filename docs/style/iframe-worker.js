/* Search from the disk: a browser starts no worker for a page that was opened as a file, so the worker's script runs in a frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      const base = new URL(url, location.href).href
      const load = address => new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script")
        script.src = new URL(address, base).href
        script.onload = resolve
        script.onerror = reject
        this.inner.document.body.appendChild(script)
      })
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inner.importScripts = (...addresses) => Promise.all(addresses.map(load))
      this.ready = load(base)
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
