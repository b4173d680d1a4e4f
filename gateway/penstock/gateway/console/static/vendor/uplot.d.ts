type Points = (number | null)[];
export default class uPlot {
  constructor(options: object, data: Points[], target: Element);
  setData(data: Points[]): void;
  setSize(size: {width: number, height: number}): void;
  redraw(): void;
  destroy(): void;
}
